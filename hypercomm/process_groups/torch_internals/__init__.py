"""torch.distributed as hypercomm uses it: the only folder that touches private names of torch.

Names are looked up at call time, so that a patched torch.distributed is respected. Checked against
the sources of torch 2.10, 2.12, 2.13, 2.14 and 2.15.

Attributes of torch are replaced while a group is created, each by a `Patch`, whose lock lets
threads share a replacement. A replacement does what torch's own attribute does in every thread but
the one that creates:

| attribute | what the creating thread gets |
|---|---|
| `ProcessGroup.bound_device_id` | None for WORLD, so that torch does not split it |
| `ProcessGroupGloo.__init__` | the shared device of a batch, or one that connects lazily or not |
| `distributed_c10d._process_group_name` | the name that all members of a split derive |
| `distributed_c10d.PrefixStore` | one prefix for all groups that change their members |

While the last one is replaced, that name of the module is a function in all threads. torch only
calls it there; `isinstance` with it would fail. `torch.distributed.PrefixStore` stays the class.

One thing is shown to all threads, on request: the default process group, by `shown_as_default`. It
is not a property of a thread in torch. A lock orders the blocks of several threads.
"""

from hypercomm.process_groups.torch_internals.capabilities import *
from hypercomm.process_groups.torch_internals.groups import *
from hypercomm.process_groups.torch_internals.split import *
from hypercomm.process_groups.torch_internals.store import *
