"""torch.distributed as hypercomm uses it: the only folder that touches private names of torch.

Names are looked up at call time, so that a patched torch.distributed is respected. Checked against
the sources of torch 2.10, 2.12, 2.13, 2.14 and 2.15.
"""

from hypercomm.process_groups.torch_internals.backends import (
    NCCL,
    backend_of,
    default_backend,
    device_type,
    devices_made_for,
    devices_of,
    holds_timeout,
    is_known,
    is_live,
    known_backends,
    parts_of,
    parts_of_world,
    put_timeout,
    set_timeout,
    single_backends,
    takes_options,
    timeout_in,
    why_not_here,
    why_unavailable,
    world_group,
    world_timeout,
)
from hypercomm.process_groups.torch_internals.capabilities import is_other_world
from hypercomm.process_groups.torch_internals.extras import (
    calls_of_groups,
    flatten_mesh,
    forget_meshes,
    keep_mesh_order,
    keeps_mesh_order,
    symmetric_memory,
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
    kept,
    missing,
    new_group,
    on_device,
    registered,
    registered_as,
    replaces_new_group,
    split_group,
)
from hypercomm.process_groups.torch_internals.split import (
    connects_as_told,
    is_nccl,
    keeps_order,
    lazy_options,
    names_splits,
    split_colors,
    why_not_alone,
    why_not_split,
)
from hypercomm.process_groups.torch_internals.store import (
    answer,
    append,
    count_up,
    exchange,
    forget,
    has_ranks,
    is_set,
    knows_store,
    meeting_place,
    read,
    read_bytes,
    set_all,
)
