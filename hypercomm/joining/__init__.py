"""`hypercomm.join()`: torch.distributed, initialised from what a launcher has left."""

from hypercomm.joining.join import join as join
from hypercomm.joining.joined import Joined as Joined
from hypercomm.joining.live import live_topology as live_topology

__all__ = ["Joined", "join", "live_topology"]
