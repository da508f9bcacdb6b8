"""Where ranks are: the hosts, NVLink domains and switches of a machine, as levels."""

from hypercomm.topology.levels import Level as Level
from hypercomm.topology.levels import Topology as Topology
from hypercomm.topology.reading import read_topology as read_topology

__all__ = ["Level", "Topology", "read_topology"]
