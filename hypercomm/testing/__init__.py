"""For users' own tests: fake and simulated worlds, real local ranks, and hypothesis strategies.

The strategies need hypothesis, which the extra `testing` brings, and no torch; the rest is the
other way round. Names resolve on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypercomm.launch import run_ranks as run_ranks
    from hypercomm.testing.fake import fake_world as fake_world
    from hypercomm.testing.groups import registered_groups as registered_groups
    from hypercomm.testing.simulation import Simulation as Simulation
    from hypercomm.testing.simulation import simulate as simulate
    from hypercomm.testing.strategies import dim_subsets as dim_subsets
    from hypercomm.testing.strategies import layouts as layouts
    from hypercomm.testing.strategies import orders as orders
    from hypercomm.testing.strategies import ranks_of as ranks_of

_HOMES = {
    "Simulation": "hypercomm.testing.simulation",
    "dim_subsets": "hypercomm.testing.strategies",
    "fake_world": "hypercomm.testing.fake",
    "layouts": "hypercomm.testing.strategies",
    "orders": "hypercomm.testing.strategies",
    "ranks_of": "hypercomm.testing.strategies",
    "registered_groups": "hypercomm.testing.groups",
    "run_ranks": "hypercomm.launch",
    "simulate": "hypercomm.testing.simulation",
}

__all__ = [
    "Simulation",
    "dim_subsets",
    "fake_world",
    "layouts",
    "orders",
    "ranks_of",
    "registered_groups",
    "run_ranks",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
