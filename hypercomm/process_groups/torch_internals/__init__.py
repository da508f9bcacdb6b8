"""torch.distributed as hypercomm uses it: the only folder that touches private names of torch.

Names are looked up at call time, so that a patched torch.distributed is respected. Checked against
the sources of torch 2.10, 2.12, 2.13, 2.14 and 2.15.
"""

from hypercomm.process_groups.torch_internals.capabilities import *
from hypercomm.process_groups.torch_internals.groups import *
from hypercomm.process_groups.torch_internals.split import *
from hypercomm.process_groups.torch_internals.store import *
