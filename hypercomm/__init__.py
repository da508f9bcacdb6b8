"""hypercomm: an object-oriented, N-dimensional communication grid for torch.distributed.

Names resolve on first use, so planning with `RankLayout` never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypercomm.compat.megatron.requests import megatron_requests as megatron_requests
    from hypercomm.grid import HyperCommGrid as HyperCommGrid
    from hypercomm.grid_set import GridSet as GridSet
    from hypercomm.launch import run_ranks as run_ranks
    from hypercomm.layout import RankGroups as RankGroups
    from hypercomm.layout import RankLayout as RankLayout
    from hypercomm.layout import RankMapping as RankMapping
    from hypercomm.presets import create_megatron_pgs as create_megatron_pgs
    from hypercomm.presets import megatron_grids as megatron_grids
    from hypercomm.process_groups.keys import GroupKey as GroupKey

__version__ = "0.1.0"

_HOMES = {
    "GridSet": "hypercomm.grid_set",
    "GroupKey": "hypercomm.process_groups.keys",
    "HyperCommGrid": "hypercomm.grid",
    "RankGroups": "hypercomm.layout",
    "RankLayout": "hypercomm.layout",
    "RankMapping": "hypercomm.layout",
    "create_megatron_pgs": "hypercomm.presets",
    "megatron_grids": "hypercomm.presets",
    "megatron_requests": "hypercomm.compat.megatron.requests",
    "run_ranks": "hypercomm.launch",
}

__all__ = [
    "GridSet",
    "GroupKey",
    "HyperCommGrid",
    "RankGroups",
    "RankLayout",
    "RankMapping",
    "__version__",
    "create_megatron_pgs",
    "megatron_grids",
    "megatron_requests",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
