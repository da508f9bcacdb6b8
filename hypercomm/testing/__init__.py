"""For users' own tests: fake and simulated worlds, real local ranks, and hypothesis strategies.

The strategies need hypothesis, which the extra `test` brings; the rest does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hypercomm.launch import run_ranks as run_ranks
from hypercomm.testing.fake import fake_world as fake_world
from hypercomm.testing.groups import registered_groups as registered_groups
from hypercomm.testing.simulate import Simulation as Simulation
from hypercomm.testing.simulate import simulate as simulate

if TYPE_CHECKING:
    from hypercomm.testing.strategies import dim_subsets as dim_subsets
    from hypercomm.testing.strategies import layouts as layouts
    from hypercomm.testing.strategies import orders as orders
    from hypercomm.testing.strategies import ranks_of as ranks_of

_STRATEGIES = ("dim_subsets", "layouts", "orders", "ranks_of")

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
    if name not in _STRATEGIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("hypercomm.testing.strategies"), name)
