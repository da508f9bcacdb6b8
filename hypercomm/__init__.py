"""hypercomm: an object-oriented, N-dimensional communication grid for torch.distributed.

Names are imported on first access, so planning with `RankLayout` never loads torch. Errors are in
`hypercomm.errors`. `__init__.pyi` has the types of all names.
"""

from hypercomm import errors as errors
from hypercomm.lazy import attributes as _attributes
from hypercomm.version import __version__ as __version__

_HOMES = {
    "GridDims": "hypercomm.grid.dims",
    "GridSet": "hypercomm.grid.grid_set",
    "GridView": "hypercomm.grid.view",
    "GroupRequest": "hypercomm.process_groups.spec",
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
"""The module that defines each name of `__all__`."""

_UNLISTED = {
    "Fused": "hypercomm.transfers.holdings",
    "GroupKey": "hypercomm.process_groups.spec",
    "Joined": "hypercomm.launch",
    "JoinedWorld": "hypercomm.launch",
    "LaunchConfig": "hypercomm.tools.launch_files",
    "Renewed": "hypercomm.launch",
    "megatron_requests": "hypercomm.compat.megatron.presets",
    "torchtitan_grids": "hypercomm.compat.torchtitan",
}
"""Names that can be imported from here, but that `dir()` does not show."""

_ROOMS = {
    "cli": "hypercomm.cli",
    "compat": "hypercomm.compat",
    "grid": "hypercomm.grid",
    "launch": "hypercomm.launch",
    "layout": "hypercomm.layout",
    "testing": "hypercomm.testing",
    "tools": "hypercomm.tools",
    "training": "hypercomm.training",
    "transfers": "hypercomm.transfers",
}

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
"""Maps each name that users may expect in this module to the module that defines it."""

__all__ = sorted([*_HOMES, "__version__"])  # noqa: PLE0605 - names of a table

__getattr__ = _attributes(__name__, {**_HOMES, **_UNLISTED, **_ROOMS}, _ELSEWHERE)


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "errors"])
