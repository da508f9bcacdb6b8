"""For users' own tests: fake and simulated worlds, real local ranks, and strategies.

The strategies need hypothesis, which the extra `testing` brings, and no torch; the rest is the
other way round. Names resolve on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypercomm import _resolver

if TYPE_CHECKING:
    from hypercomm.launch import run_ranks as run_ranks
    from hypercomm.testing.fake import fake_world as fake_world
    from hypercomm.testing.groups import registered_groups as registered_groups
    from hypercomm.testing.kit.given import given_ranks as given_ranks
    from hypercomm.testing.mapping_strategies import mappings as mappings
    from hypercomm.testing.mapping_strategies import shardings as shardings
    from hypercomm.testing.simulation import Simulation as Simulation
    from hypercomm.testing.simulation import simulate as simulate
    from hypercomm.testing.strategies import dim_subsets as dim_subsets
    from hypercomm.testing.strategies import grids as grids
    from hypercomm.testing.strategies import layouts as layouts
    from hypercomm.testing.strategies import orders as orders
    from hypercomm.testing.strategies import ranks_of as ranks_of
    from hypercomm.testing.strategies import views_of as views_of

_HOMES = {
    "Simulation": "hypercomm.testing.simulation",
    "dim_subsets": "hypercomm.testing.strategies",
    "fake_world": "hypercomm.testing.fake",
    "given_ranks": "hypercomm.testing.kit.given",
    "grids": "hypercomm.testing.strategies",
    "layouts": "hypercomm.testing.strategies",
    "mappings": "hypercomm.testing.mapping_strategies",
    "orders": "hypercomm.testing.strategies",
    "ranks_of": "hypercomm.testing.strategies",
    "registered_groups": "hypercomm.testing.groups",
    "run_ranks": "hypercomm.launch",
    "shardings": "hypercomm.testing.mapping_strategies",
    "simulate": "hypercomm.testing.simulation",
    "views_of": "hypercomm.testing.strategies",
}

__all__ = [
    "Simulation",
    "dim_subsets",
    "fake_world",
    "given_ranks",
    "grids",
    "layouts",
    "mappings",
    "orders",
    "ranks_of",
    "registered_groups",
    "run_ranks",
    "shardings",
    "simulate",
    "views_of",
]


__getattr__ = _resolver(__name__, _HOMES)
