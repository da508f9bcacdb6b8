"""What the real ranks of test_private_names.py do without private names of torch."""

import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid
from hypercomm.compat.megatron import parallel_state
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.job import current
from hypercomm.process_groups.torch_internals import capabilities
from ranks.common import registered, sum_over

NAMES = [name for name, value in vars(capabilities).items() if name.isupper() and value is True]
"""The flags that are set: torch 2.10 lacks one of the names."""


def use():
    """Create groups in every way, hand them on, and end them; return what was received."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        sums = [sum_over(grid.create_pg(dims)) for dims in ("tp", "dp")]
        batch = [{"dims": dims, "name": "twin"} for dims in ("tp", ("tp", "dp"))]
        sums += [sum_over(group) for group in grid.create_pgs(batch)]
        strategy = grid.explain("tp").strategy
        mesh = grid.device_mesh("dp", "tp")["tp"]
        local = torch.full((1,), 10 ** dist.get_rank())
        sharded = DTensor.from_local(local, mesh, [Shard(0)])
        assert int(sharded.redistribute(mesh, [Replicate()]).to_local().sum()) == sums[0]
    state = parallel_state.ParallelState.create(tensor_model_parallel_size=2)
    with state, parallel_state.use(state):
        assert sum_over(parallel_state.get_tensor_model_parallel_group()) == sums[0]
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    sums.append(sum_over(grid.create_pg("dp")))
    grid.abort()
    return sums, strategy


def without_each():
    """Clear each flag, and all of them; return what was received and whether nothing is left."""
    found, before, job = {}, registered(), current()
    for lost in ("none", *NAMES, "all"):
        cleared = {"none": [], "all": NAMES}.get(lost, [lost])
        for name in NAMES:
            setattr(capabilities, name, name not in cleared)
        job.has_store = c10d.knows_store()
        job.choices.clear()
        found[lost] = *use(), registered() == before
    return found


def flag_after_enumeration():
    """Enumerate groups that leave a rank out; return whether it is in one, and gloo's flag."""
    with HyperCommGrid("pp=3", creation="enumerate") as grid:
        ends = grid.create_pg(
            "pp", name="ends", derive=lambda groups: groups.pick(lambda ranks: ranks[::2])
        )
        return ends is not None, capabilities.GLOO
