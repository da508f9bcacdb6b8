"""hypercomm: an object-oriented, N-dimensional communication grid for torch.distributed.

Names resolve on first use, so planning with `RankLayout` never loads torch. Errors are in
`hypercomm.errors`.
"""

from __future__ import annotations

import importlib as _importlib
import sys as _sys
from collections.abc import Callable as _Callable
from collections.abc import Mapping as _Mapping
from typing import TYPE_CHECKING, Any

from hypercomm import errors as errors

if TYPE_CHECKING:
    from hypercomm import cli as cli
    from hypercomm import compat as compat
    from hypercomm import grid as grid
    from hypercomm import launch as launch
    from hypercomm import layout as layout
    from hypercomm import testing as testing
    from hypercomm import tools as tools
    from hypercomm import training as training
    from hypercomm import transfers as transfers
    from hypercomm.compat.megatron.presets import create_megatron_pgs as create_megatron_pgs
    from hypercomm.compat.megatron.presets import megatron_grids as megatron_grids
    from hypercomm.compat.megatron.presets import megatron_requests as megatron_requests
    from hypercomm.compat.torchtitan import torchtitan_grids as torchtitan_grids
    from hypercomm.grid import HyperCommGrid as HyperCommGrid
    from hypercomm.grid.dims import GridDims as GridDims
    from hypercomm.grid.grid_set import GridSet as GridSet
    from hypercomm.grid.view import GridView as GridView
    from hypercomm.launch import Joined as Joined
    from hypercomm.launch import JoinedWorld as JoinedWorld
    from hypercomm.launch import Renewed as Renewed
    from hypercomm.launch import join as join
    from hypercomm.launch import join_world as join_world
    from hypercomm.launch import renew_world as renew_world
    from hypercomm.launch import run_ranks as run_ranks
    from hypercomm.layout import RankGroups as RankGroups
    from hypercomm.layout import RankLayout as RankLayout
    from hypercomm.process_groups.spec import GroupKey as GroupKey
    from hypercomm.process_groups.spec import GroupRequest as GroupRequest
    from hypercomm.process_groups.world import World as World
    from hypercomm.testing.worlds import fake_world as fake_world
    from hypercomm.tools.draw import draw as draw
    from hypercomm.tools.launch_files import LaunchConfig as LaunchConfig
    from hypercomm.tools.launch_files import read_config as read_config
    from hypercomm.tools.place import live_topology as live_topology
    from hypercomm.tools.place import place as place
    from hypercomm.tools.place import read_topology as read_topology
    from hypercomm.training import clip_grad_norm_ as clip_grad_norm_
    from hypercomm.transfers.holdings import Fused as Fused
    from hypercomm.transfers.mapping import RankMapping as RankMapping
    from hypercomm.transfers.state import transfer_state as transfer_state
    from hypercomm.transfers.transfer import transfer as transfer

__version__ = "0.1.0"

_HOMES = {
    "GridDims": "hypercomm.grid.dims",
    "GridSet": "hypercomm.grid.grid_set",
    "GroupRequest": "hypercomm.process_groups.spec",
    "GridView": "hypercomm.grid.view",
    "HyperCommGrid": "hypercomm.grid",
    "RankGroups": "hypercomm.layout",
    "RankLayout": "hypercomm.layout",
    "RankMapping": "hypercomm.transfers.mapping",
    "World": "hypercomm.process_groups.world",
    "clip_grad_norm_": "hypercomm.training",
    "create_megatron_pgs": "hypercomm.compat.megatron.presets",
    "draw": "hypercomm.tools.draw",
    "fake_world": "hypercomm.testing",
    "join": "hypercomm.launch",
    "join_world": "hypercomm.launch",
    "live_topology": "hypercomm.tools.place",
    "megatron_grids": "hypercomm.compat.megatron.presets",
    "place": "hypercomm.tools.place",
    "read_config": "hypercomm.tools.launch_files",
    "read_topology": "hypercomm.tools.place",
    "renew_world": "hypercomm.launch",
    "run_ranks": "hypercomm.launch",
    "transfer": "hypercomm.transfers.transfer",
    "transfer_state": "hypercomm.transfers.state",
}
_RARE = {
    "Fused": "hypercomm.transfers.holdings",
    "GroupKey": "hypercomm.process_groups.spec",
    "Joined": "hypercomm.launch",
    "JoinedWorld": "hypercomm.launch",
    "LaunchConfig": "hypercomm.tools.launch_files",
    "Renewed": "hypercomm.launch",
    "megatron_requests": "hypercomm.compat.megatron.presets",
    "torchtitan_grids": "hypercomm.compat.torchtitan",
}
"""Names that resolve here and are not listed."""

_ELSEWHERE = {
    "difference": "hypercomm.layout.difference",
    "given_ranks": "hypercomm.testing",
    "grad_norm": "hypercomm.training",
    "install": "hypercomm.compat.megatron",
    "layouts": "hypercomm.testing",
    "mpu": "hypercomm.compat.deepspeed",
    "parallel_state": "hypercomm.compat.megatron",
    "simulate": "hypercomm.testing",
    **dict.fromkeys(errors.__all__, "hypercomm.errors"),
}
"""Where names are that people look for here."""

_PACKAGES = {
    "torch": "torch",
    "rich": "'hypercomm[cli]'",
    "tomli": "'hypercomm[cli]'",
    "resvg_py": "'hypercomm[draw]'",
    **dict.fromkeys(("hostlist", "yaml"), "'hypercomm[place]'"),
    **dict.fromkeys(("cloudpickle", "hypothesis", "pytest"), "'hypercomm[testing]'"),
}
"""What installs a package that not everybody needs."""

_ROOMS = ["cli", "compat", "grid", "launch", "layout", "testing", "tools", "training", "transfers"]

__all__ = sorted({*_HOMES, "__version__"})  # noqa: PLE0605 - names of a table


def _missing(package: str, what: str) -> errors.MissingPackageError:
    """Return the error for a package that is not installed, and that something needs."""
    name = package.partition(".")[0]
    return errors.MissingPackageError(f"{what} needs {name}: pip install {_PACKAGES[name]}")


def _required(package: str, what: str) -> Any:
    """Import a package that something needs, or raise MissingPackageError."""
    try:
        return _importlib.import_module(package)
    except ImportError as error:
        raise _missing(package, what) from error


def _resolver(module: str, homes: _Mapping[str, str]) -> _Callable[[str], Any]:
    """Make a module's `__getattr__`, which imports what is asked for from its home."""

    def resolve(name: str) -> Any:
        if name not in homes:
            there = _ELSEWHERE.get(name) if module == __name__ else None
            hint = f"; write `from {there} import {name}`" if there else ""
            raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
        try:
            home = _importlib.import_module(homes[name])
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in _PACKAGES:
                raise
            raise _missing(package, f"{module}.{name}") from error
        value = home if home.__name__ == f"{module}.{name}" else getattr(home, name)
        setattr(_sys.modules[module], name, value)
        return value

    return resolve


__getattr__ = _resolver(
    __name__, {**_HOMES, **_RARE, **{room: f"hypercomm.{room}" for room in _ROOMS}}
)


def __dir__() -> list[str]:
    return sorted({*_HOMES, *_ROOMS, "errors", "__version__"})
