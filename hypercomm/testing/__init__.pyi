# The names that `__init__.py` imports on first access.

from types import SimpleNamespace

from hypercomm.launch import run_ranks as run_ranks
from hypercomm.testing import properties as properties
from hypercomm.testing.on_ranks import given_ranks as given_ranks
from hypercomm.testing.simulation import Simulation as Simulation, simulate as simulate
from hypercomm.testing.strategies import (
    dim_subsets as dim_subsets,
    grids as grids,
    layouts as layouts,
    mappings as mappings,
    orders as orders,
    ranks_of as ranks_of,
    shardings as shardings,
    views_of as views_of,
)
from hypercomm.testing.worlds import (
    fake_world as fake_world,
    registered_groups as registered_groups,
)

ranks_bound: SimpleNamespace

__all__ = [
    "Simulation",
    "dim_subsets",
    "fake_world",
    "given_ranks",
    "grids",
    "layouts",
    "mappings",
    "orders",
    "properties",
    "ranks_of",
    "registered_groups",
    "run_ranks",
    "shardings",
    "simulate",
    "views_of",
]
