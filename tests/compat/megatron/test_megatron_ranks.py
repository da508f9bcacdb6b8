"""Test Megatron's names on real gloo processes, with the ranks that megatron-core computes."""

import gc
import sys
import time
from functools import partial

import cloudpickle
import pytest
import torch.distributed as dist
from group_checks import all_reduce_of, left_over, settle, tables as registered, threads_and_files
from megatron_comparison import state_of, theirs

from hypercomm.compat.megatron import ParallelState, parallel_state
from hypercomm.compat.megatron.state import GLOBALS
from hypercomm.errors import PlanMismatchError
from hypercomm.launch import run_ranks

# This module imports megatron.core, which ranks must not do before install().
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# Together, these configurations create every kind of group.
DENSE = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "hierarchical_context_parallel_sizes": [2, 1],
    "create_all_gather_group": True,
    "hybrid_context_parallel": True,
}
EXPERTS = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "num_distributed_optimizer_instances": 2,
    "create_all_gather_group": True,
}


_DP_CP = "_DATA_PARALLEL_GROUP_WITH_CP"


def expected_sums(arguments, rank, world_size=8):
    """Map names of Megatron's global group variables to the sums that a rank should compute.

    Each sum is the sum of 2**member over the members of the rank's group in megatron-core.
    """
    sums = {}
    for name, value in state_of(theirs, world_size, rank, arguments).items():
        if not name.startswith("_"):
            continue
        items = enumerate(value) if isinstance(value, list) else [("", value)]
        items = value.items() if isinstance(value, dict) else items
        for place, group in items:
            if isinstance(group, tuple):
                sums[f"{name}{place}"] = sum(2**member for member in group)
    if arguments.get("create_all_gather_group"):  # newer releases have no such global
        sums.setdefault(f"{_DP_CP}_AG", sums[_DP_CP])
    for name in list(sums):  # without GTP peers, these groups have the same ranks
        for end in ("_WITH_GTP_REMAT", "_WITH_EGTP"):
            if name + end in GLOBALS:
                sums.setdefault(name + end, sums[name])
    return sums


def groups_of(state):
    """Yield each group with the name of its global, plus its index or key in a list or dict."""
    for name in sorted(set(state.values) - {"_global_process_group_list"}):
        value = state.read(name)
        items = enumerate(value) if isinstance(value, list) else [("", value)]
        items = value.items() if isinstance(value, dict) else items
        for place, group in items:
            if isinstance(group, dist.ProcessGroup):
                yield f"{name}{place}", group


def sums_over_every_group(state):
    """Return the sum of 2**rank over each group. Its binary digits show which ranks took part."""
    return {name: all_reduce_of(2 ** dist.get_rank(), group) for name, group in groups_of(state)}


def cycles(count, arguments):
    """Initialise, sum over every group and destroy, many times. Return sums and resources."""
    state = parallel_state.current.default
    sums = []
    for cycle in range(count + 1):
        parallel_state.initialize_model_parallel(**arguments)
        sums.append(sums_over_every_group(state))
        created = len(registered()[0])
        parallel_state.destroy_model_parallel()
        dist.barrier()  # do not count while a peer still closes its connections
        gc.collect()
        if cycle == 0:  # torch starts some threads and opens files at the first collective
            settle()
            before = registered(), threads_and_files()
    return {
        "sums": sums[0],
        "always the same": all(each == sums[0] for each in sums),
        "created": created - len(before[0][0]),
        "left over": left_over(before[1]),
        "registered": registered() == before[0],
    }


# Initialise with gloo groups, sum over every group and destroy, many times. The members are the
# same as in Megatron, and all groups, threads and files are released.
@pytest.mark.full
@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arguments", [DENSE, EXPERTS])
def test_cycles_leak_nothing(arguments, count):
    found = run_ranks(partial(cycles, count, arguments), 8, timeout=300)
    for rank, cycle in enumerate(found):
        assert cycle["sums"] == expected_sums(arguments, rank)
        assert cycle["always the same"]
        assert cycle["created"] > 15
        assert cycle["registered"]
        assert cycle["left over"] == (0, 0)


def shared(arguments):
    """Count the groups that share="identical" creates, and sum over them."""
    before = len(registered()[0])
    with ParallelState.create(**arguments, share="identical") as state:
        sets = {
            tuple(dist.get_process_group_ranks(group))
            for name, group in groups_of(state)
            if not name.endswith("_AG")
        }
        created = len(registered()[0]) - before
        sums = sums_over_every_group(state)
        overlapping = state.values["_DATA_PARALLEL_GROUP_WITH_CP_AG"]
        alone = [name for name, group in groups_of(state) if group is overlapping]
    return len(sets), created, alone, sums, len(registered()[0]) - before


# With share="identical", a rank has one group for each distinct set of ranks. The all-gather group
# is an exception: it must be separate, so that its collectives can overlap with other collectives.
@pytest.mark.parametrize("arguments", [pytest.param(DENSE, marks=pytest.mark.full), EXPERTS])
def test_share_identical(arguments):
    found = run_ranks(partial(shared, arguments), 8)
    for rank, (sets, created, alone, sums, left) in enumerate(found):
        wanted = expected_sums(arguments, rank)
        assert sets == len(set(wanted.values()))
        assert created == sets + 1
        assert alone == ["_DATA_PARALLEL_GROUP_WITH_CP_AG"]
        assert sums == wanted
        assert left == 0


def one_rank_differs(times):
    """Initialise with a wrong size on rank 1, then with equal sizes on all ranks, several times."""
    found = []
    for _ in range(times):
        before = registered()
        began = time.monotonic()
        with pytest.raises(PlanMismatchError):
            parallel_state.initialize_model_parallel(4 if dist.get_rank() == 1 else 2)
        took = time.monotonic() - began
        left = registered() == before and not parallel_state.is_initialized()
        dist.barrier()
        parallel_state.initialize_model_parallel(2)
        group = parallel_state.get_tensor_model_parallel_group()
        found.append((took, left, all_reduce_of(2 ** dist.get_rank(), group)))
        parallel_state.destroy_model_parallel()
        dist.barrier()
    return found


# After a mistake on one rank, all ranks raise within a second, although the timeout is 30 minutes.
# The next call succeeds. The fastest of three tries counts, because the machine may pause.
@pytest.mark.alone
def test_mistake_on_one_rank_fails_all():
    found = run_ranks(partial(one_rank_differs, 3), 4)
    assert min(max(took for took, _, _ in ranks) for ranks in zip(*found, strict=True)) < 1
    for rank, tries in enumerate(found):
        assert {(left, total) for _, left, total in tries} == {(True, 0b11 << rank // 2 * 2)}
