"""torchtitan's meshes, as views of one grid."""

from hypercomm.compat.torchtitan.presets import torchtitan_grids as torchtitan_grids
from hypercomm.compat.torchtitan.presets import torchtitan_meshes as torchtitan_meshes

__all__ = ["torchtitan_grids", "torchtitan_meshes"]
