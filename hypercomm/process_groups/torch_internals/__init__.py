"""The functions of torch.distributed that hypercomm needs.

Only this folder uses private names of torch. Other packages import this module as `torchdist`, and
do not import its files. Functions take plain values: ranks, names, options and a store. Names of
torch are looked up at call time, so that a patched torch.distributed is respected. The code was
checked against the sources of torch 2.10, 2.12, 2.13, 2.14 and 2.15.

Some attributes of torch are replaced while a group is created, each by a `Patch`. In the thread
that creates the group, a replacement has the effect in this table. In all other threads, it does
the same as the original:

| attribute | effect in the creating thread |
|---|---|
| `ProcessGroup.bound_device_id` | is None for WORLD, so that torch does not split it |
| `ProcessGroupGloo.__init__` | uses a device with another `lazy_init` |
| `distributed_c10d._process_group_name` | returns the name that all members of a split derive |
| `distributed_c10d.PrefixStore` | uses one prefix for all groups that can be reconfigured |

While `distributed_c10d.PrefixStore` is replaced, it is a function in all threads. torch only calls
it; `isinstance` would fail. `torch.distributed.PrefixStore` remains the class.

`shown_as_default` changes torch's default process group, which torch does not keep per thread. All
threads see the change.
"""

from hypercomm.process_groups.torch_internals.capabilities import (
    NCCL as NCCL,
    backend_config as backend_config,
    backend_of as backend_of,
    default_backend as default_backend,
    default_store as default_store,
    default_timeout as default_timeout,
    device_type as device_type,
    devices_made_for as devices_made_for,
    given_timeout as given_timeout,
    has_ranks as has_ranks,
    has_timeout as has_timeout,
    is_fake_options as is_fake_options,
    is_known as is_known,
    is_patched_world as is_patched_world,
    known_backends as known_backends,
    pairs_of as pairs_of,
    parts_of as parts_of,
    parts_of_world as parts_of_world,
    read_bytes as read_bytes,
    set_timeout as set_timeout,
    single_backends as single_backends,
    store_address as store_address,
    takes_options as takes_options,
    why_unavailable as why_unavailable,
    with_timeout as with_timeout,
    without_prefix as without_prefix,
    world_group as world_group,
    world_options as world_options,
)
from hypercomm.process_groups.torch_internals.gloo import (
    lazy_init as lazy_init,
)
from hypercomm.process_groups.torch_internals.groups import (
    abort as abort,
    as_member as as_member,
    destroy as destroy,
    destroy_world as destroy_world,
    end_world as end_world,
    forget_non_members as forget_non_members,
    note_creation as note_creation,
    is_registered as is_registered,
    isolate as isolate,
    kept as kept,
    new_group as new_group,
    reconfigure as reconfigure,
    registered as registered,
    registered_as as registered_as,
    release as release,
    shown_as_default as shown_as_default,
    split_group as split_group,
    why_not_members as why_not_members,
    why_not_reconfigured as why_not_reconfigured,
)
from hypercomm.process_groups.torch_internals.meshes import (
    flatten_mesh as flatten_mesh,
    flattened as flattened,
    forget_meshes as forget_meshes,
    keep_mesh_order as keep_mesh_order,
    keeps_mesh_order as keeps_mesh_order,
    mesh_of as mesh_of,
    part_of_mesh as part_of_mesh,
)
from hypercomm.process_groups.torch_internals.split import (
    bound_device as bound_device,
    connects_as_told as connects_as_told,
    is_nccl as is_nccl,
    keeps_order as keeps_order,
    lazy_options as lazy_options,
    split_colors as split_colors,
    split_device as split_device,
    why_not_split as why_not_split,
)
