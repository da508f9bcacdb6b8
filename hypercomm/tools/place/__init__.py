"""Describes machines, and shows how the groups of a layout are spread over hosts and switches."""

from hypercomm.tools.place.live import live_topology as live_topology
from hypercomm.tools.place.placing import Placed as Placed, Spread as Spread, place as place
from hypercomm.tools.place.reading import On as On, read_topology as read_topology
from hypercomm.tools.place.topology import Level as Level, Topology as Topology
from hypercomm.tools.place.traffic import Traffic as Traffic
