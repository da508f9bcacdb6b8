"""GridSet: several named grids in one job, one behind the other or on the same ranks."""

from hypercomm.grid_set.grid_set import GridSet as GridSet
