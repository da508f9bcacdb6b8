"""The functions of torch.distributed that hypercomm needs.

Only this folder uses private names of torch. Other packages import this module as `torchdist`, and
do not import its files. The exception is `debug_server`, which cannot be imported with every
version of torch. Functions take plain values: ranks, names, options and a store. Names of torch are
looked up at call time, so that a patched torch.distributed is respected. The code was checked
against the sources of torch 2.10, 2.12, 2.13, 2.14 and 2.15.

Some attributes of torch are replaced while a group is created, each by a `Patch`. In the thread
that creates the group, a replacement has the effect in this table. In all other threads, it does
the same as the original:

| attribute | effect in the creating thread |
|---|---|
| `ProcessGroup.bound_device_id` | is None for WORLD, so that torch does not split it |
| `ProcessGroupGloo.__init__` | uses the shared device of a batch, or one with another `lazy_init` |
| `distributed_c10d._process_group_name` | returns the name that all members of a split derive |
| `distributed_c10d.PrefixStore` | uses one prefix for all groups that can be reconfigured |

While `distributed_c10d.PrefixStore` is replaced, it is a function in all threads. torch only calls
it; `isinstance` would fail. `torch.distributed.PrefixStore` remains the class.

`shown_as_default` changes torch's default process group, which torch does not keep per thread. All
threads see the change.
"""

from hypercomm.process_groups.torch_internals.capabilities import (
    NCCL,
    backend_config,
    backend_of,
    default_backend,
    default_store,
    default_timeout,
    device_type,
    devices_made_for,
    given_timeout,
    has_ranks,
    has_timeout,
    is_fake_options,
    is_known,
    is_other_world,
    known_backends,
    pairs_of,
    parts_of,
    parts_of_world,
    set_timeout,
    single_backends,
    store_address,
    takes_options,
    why_unavailable,
    with_timeout,
    without_prefix,
    world_group,
    world_options,
)
from hypercomm.process_groups.torch_internals.gloo import (
    ConnectionFailedError,
    lazy_init,
    one_device,
)
from hypercomm.process_groups.torch_internals.groups import (
    abort,
    as_member,
    current_device,
    destroy,
    destroy_world,
    end_world,
    forget_non_members,
    is_registered,
    isolate,
    kept,
    new_group,
    on_device,
    reconfigure,
    registered,
    registered_as,
    shown_as_default,
    split_group,
    why_not_members,
    why_not_reconfigured,
)
from hypercomm.process_groups.torch_internals.meshes import (
    flatten_mesh,
    flattened,
    forget_meshes,
    keep_mesh_order,
    keeps_mesh_order,
    mesh_of,
    part_of_mesh,
)
from hypercomm.process_groups.torch_internals.split import (
    bound_device,
    connects_as_told,
    connects_at_creation,
    is_nccl,
    keeps_order,
    lazy_options,
    split_colors,
    split_device,
    why_not_split,
)
from hypercomm.process_groups.torch_internals.store import (
    read_bytes,
)

__all__ = [
    "NCCL",
    "ConnectionFailedError",
    "abort",
    "as_member",
    "backend_config",
    "backend_of",
    "bound_device",
    "connects_as_told",
    "connects_at_creation",
    "current_device",
    "default_backend",
    "default_store",
    "default_timeout",
    "destroy",
    "destroy_world",
    "device_type",
    "devices_made_for",
    "end_world",
    "flatten_mesh",
    "flattened",
    "forget_meshes",
    "forget_non_members",
    "given_timeout",
    "has_ranks",
    "has_timeout",
    "is_fake_options",
    "is_known",
    "is_nccl",
    "is_other_world",
    "is_registered",
    "isolate",
    "keep_mesh_order",
    "keeps_mesh_order",
    "keeps_order",
    "kept",
    "known_backends",
    "lazy_init",
    "lazy_options",
    "mesh_of",
    "new_group",
    "on_device",
    "one_device",
    "pairs_of",
    "part_of_mesh",
    "parts_of",
    "parts_of_world",
    "read_bytes",
    "reconfigure",
    "registered",
    "registered_as",
    "set_timeout",
    "shown_as_default",
    "single_backends",
    "split_colors",
    "split_device",
    "split_group",
    "store_address",
    "takes_options",
    "why_not_members",
    "why_not_reconfigured",
    "why_not_split",
    "why_unavailable",
    "with_timeout",
    "without_prefix",
    "world_group",
    "world_options",
]
