"""Loads the launch files of the tests: their texts in words of our own, and the sizes in them."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Megatron:
    """Sizes for megatron-core's RankGenerator. dp is inferred from the other sizes."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class Titan:
    """Sizes for torchtitan's ParallelDims."""

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1


@dataclass(frozen=True)
class Mesh:
    """Meshes for torch's init_device_mesh: names and shape. The last dim varies fastest."""

    meshes: dict = field(default_factory=dict)


@dataclass(frozen=True)
class VLLM:
    """Sizes of vLLM's parallel_state, and the number of engines."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    engines: int = 1
    expert: bool = False


@dataclass(frozen=True)
class SGLang:
    """Sizes of SGLang's parallel_state. `attn_dp` is the dp size of attention, inside tp."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    attn_dp: int = 1
    engines: int = 1


FAMILIES = {one.__name__: one for one in (Megatron, Titan, Mesh, VLLM, SGLang)}


@dataclass(frozen=True)
class Input:
    repository: str
    path: str
    text: str
    framework: str
    world: int
    modules: dict
    given_world: int | None = None
    total: int | None = None  # if modules with ranks of their own are added
    problems: tuple = ()  # a phrase from the text of each problem

    @property
    def name(self):
        return f"{self.repository}:{self.path}"


def _wanted(row):
    """Return the sizes of a module, or None if its layout cannot be read."""
    family = FAMILIES[row.pop("family")] if row else None
    if "meshes" in row:
        row["meshes"] = {name.replace("base", ""): mesh for name, mesh in row["meshes"].items()}
    return family and family(**row)


def load(name):
    """Return the content of a TOML file in this folder."""
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


INPUTS = [
    Input(**row | {"modules": {name: _wanted(one) for name, one in row["modules"].items()}})
    for row in load("launch_inputs.toml")["input"]
]
