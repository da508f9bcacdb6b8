"""`hypercomm.join()`: torch.distributed, initialised from what a launcher has left."""

from hypercomm.joining.join import join as join
from hypercomm.joining.joined import Joined as Joined

__all__ = ["Joined", "join"]
