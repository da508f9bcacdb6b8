"""Fake and simulated worlds, real local ranks, and hypothesis strategies, for users' own tests.

The strategies need hypothesis, which the extra `testing` installs, but not torch. The other names
need torch. Names are imported on first use.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from hypercomm.lazy import attributes

if TYPE_CHECKING:
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

_STRATEGIES = "dim_subsets grids layouts mappings orders ranks_of shardings views_of"

_HOMES = {
    **dict.fromkeys(_STRATEGIES.split(), "hypercomm.testing.strategies"),
    "Simulation": "hypercomm.testing.simulation",
    "fake_world": "hypercomm.testing.worlds",
    "given_ranks": "hypercomm.testing.on_ranks",
    "properties": "hypercomm.testing.properties",
    "registered_groups": "hypercomm.testing.worlds",
    "run_ranks": "hypercomm.launch",
    "simulate": "hypercomm.testing.simulation",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - names of a table

# `most` is pytest's --ranks-max, which excludes larger examples of `given_ranks`. `left_out` is the
# number of ranks of the smallest excluded example, or 0 if no example was excluded.
ranks_bound = SimpleNamespace(most=None, left_out=0)

__getattr__ = attributes(__name__, _HOMES)
