"""HyperCommGrid: owns a hyperrectangle of ranks, its views, and the process groups over both."""

from hypercomm.grid.grid import HyperCommGrid as HyperCommGrid
