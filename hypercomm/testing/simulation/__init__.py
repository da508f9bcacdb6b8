"""Worlds without a world: the same program as every rank of a large job, in one process."""

from __future__ import annotations

from hypercomm.testing.simulation.result import Simulation as Simulation
from hypercomm.testing.simulation.running import simulate as simulate

__all__ = ["Simulation", "simulate"]
