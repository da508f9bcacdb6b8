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
    is_known,
    is_live,
    known_backends,
    pairs_of,
    parts_of,
    parts_of_world,
    set_timeout,
    single_backends,
    takes_options,
    why_not_here,
    why_unavailable,
    world_group,
    world_options,
)
from hypercomm.process_groups.torch_internals.capabilities import is_other_world
from hypercomm.process_groups.torch_internals.extras import (
    calls_of_groups,
    flatten_mesh,
    forget_meshes,
    keep_mesh_order,
    keeps_mesh_order,
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
    new_group,
    on_device,
    registered,
    registered_as,
    shown_as_default,
    split_group,
    why_not_members,
)
from hypercomm.process_groups.torch_internals.reconfigure import (
    isolate,
    reconfigure,
    why_not_reconfigured,
)
from hypercomm.process_groups.torch_internals.split import (
    connects_as_told,
    is_nccl,
    keeps_order,
    lazy_options,
    split_colors,
    why_not_split,
)
from hypercomm.process_groups.torch_internals.store import (
    has_ranks,
    meeting_place,
    read_bytes,
)
