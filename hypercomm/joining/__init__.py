"""`hypercomm.join()`: torch.distributed, initialised from what a launcher has left, or anew."""

from hypercomm.joining.join import join as join
from hypercomm.joining.joined import Joined as Joined
from hypercomm.joining.renewing import Renewed as Renewed
from hypercomm.joining.renewing import renew_world as renew_world

__all__ = ["Joined", "Renewed", "join", "renew_world"]
