"""HyperCommGrid: a grid of ranks that owns its views and its process groups."""

from hypercomm.grid.grid import HyperCommGrid as HyperCommGrid
