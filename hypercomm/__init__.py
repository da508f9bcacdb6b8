"""hypercomm: an object-oriented, N-dimensional communication grid for torch.distributed.

Names resolve on first use, so planning with `RankLayout` never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypercomm.grid import HyperCommGrid as HyperCommGrid
    from hypercomm.launch import run_ranks as run_ranks
    from hypercomm.layout import RankGroups as RankGroups
    from hypercomm.layout import RankLayout as RankLayout
    from hypercomm.process_groups.owner import GroupKey as GroupKey

__version__ = "0.1.0"

_HOMES = {
    "GroupKey": "hypercomm.process_groups.owner",
    "HyperCommGrid": "hypercomm.grid",
    "RankGroups": "hypercomm.layout",
    "RankLayout": "hypercomm.layout",
    "run_ranks": "hypercomm.launch",
}

__all__ = ["GroupKey", "HyperCommGrid", "RankGroups", "RankLayout", "__version__", "run_ranks"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
