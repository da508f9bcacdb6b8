"""What DeepSpeed takes: an `mpu` on any grid, and a `ProcessTopology` made from a layout.

DeepSpeed itself is imported when a topology is asked for, and not before.
"""

from __future__ import annotations

from hypercomm.compat.deepspeed.mpu import Mpu as Mpu
from hypercomm.compat.deepspeed.topology import process_topology as process_topology
from hypercomm.compat.deepspeed.topology import topology_axes as topology_axes

__all__ = ["Mpu", "process_topology", "topology_axes"]
