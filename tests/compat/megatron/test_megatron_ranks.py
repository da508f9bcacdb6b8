"""Test Megatron's names on real gloo processes, with the ranks that megatron-core computes."""

import gc
import re
import sys
import threading
import time
from functools import partial

import cloudpickle
import pytest
import torch.distributed as dist
from group_checks import all_reduce_of, settle, threads_and_files, wait_for_release
from group_checks import tables as registered
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
        "before": before[1],
        "after": wait_for_release(before[1]),
        "registered": registered() == before[0],
    }


# Initialise with gloo groups, sum over every group and destroy, many times. The members are the
# same as in Megatron, and all groups, threads and files are released.
@pytest.mark.full
@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arguments", [DENSE, EXPERTS])
def test_cycles_leak_nothing(arguments, count):
    found = run_ranks(partial(cycles, count, arguments), 8, timeout=300)
    for rank, cycle in enumerate(found):
        assert cycle["sums"] == expected_sums(arguments, rank)
        assert cycle["always the same"]
        assert cycle["created"] > 15
        assert cycle["registered"]
        assert cycle["after"] == cycle["before"]


UNEVEN = {
    "context_parallel_size": 2,
    "hybrid_context_parallel": True,
    "create_gloo_process_groups": False,
}
"""On 10 ranks, the last hybrid group of size 4 has only two ranks."""


def sums_once(arguments):
    """Return the sum over every group of one configuration."""
    parallel_state.initialize_model_parallel(**arguments)
    sums = sums_over_every_group(parallel_state.current.default)
    parallel_state.destroy_model_parallel()
    return sums


# Hybrid groups communicate even if the last group is smaller.
@pytest.mark.full
def test_uneven_hybrid_groups():
    for rank, sums in enumerate(run_ranks(partial(sums_once, UNEVEN), 10, timeout=120)):
        assert sums == expected_sums(UNEVEN, rank, 10)
        four = [2**member for member in range(rank // 4 * 4, min(rank // 4 * 4 + 4, 10))]
        assert sums["_HYBRID_DP_CP_GROUPS4"] == sum(four)


def two_states():
    """Use two configurations in one process: alternating, nested, and one per thread."""
    wide = ParallelState.create(tensor_model_parallel_size=4, create_gloo_process_groups=False)
    narrow = ParallelState.create(tensor_model_parallel_size=2, create_gloo_process_groups=False)

    def reduce():
        size = parallel_state.get_tensor_model_parallel_world_size()
        return size, all_reduce_of(
            2 ** dist.get_rank(), parallel_state._TENSOR_MODEL_PARALLEL_GROUP
        )

    answers = []
    in_threads = {}
    with wide, narrow:
        for _ in range(3):
            for state in (wide, narrow):
                with parallel_state.use(state):
                    answers.append(reduce())
        with parallel_state.use(wide), parallel_state.use(narrow):
            answers.append(reduce())

        def own(name, state):
            with parallel_state.use(state):
                in_threads[name] = reduce()

        threads = [threading.Thread(target=own, args=item) for item in [("w", wide), ("n", narrow)]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return answers, in_threads, parallel_state.is_initialized()


# Two states exist at the same time. `use` blocks alternate, nest, and are separate in each thread.
def test_two_states_on_ranks():
    for rank, (answers, in_threads, default) in enumerate(run_ranks(two_states, 4)):
        wide, narrow = (4, 0b1111), (2, 0b11 << rank // 2 * 2)
        assert answers == [*([wide, narrow] * 3), narrow]
        assert in_threads == {"w": wide, "n": narrow}
        assert not default


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


def one_rank_late(late):
    """Create with a rank that joins too late, which fails on all ranks. Then try again."""
    before = registered()
    rank = dist.get_rank()
    if rank == late:
        dist.barrier()
    try:
        parallel_state.initialize_model_parallel(2, distributed_timeout_minutes=1 / 60)
    except RuntimeError as error:  # CreationError, or gloo's error on the late rank
        message = str(error)
    if rank != late:
        dist.barrier()
    left = registered() == before and not parallel_state.is_initialized()
    dist.barrier()
    parallel_state.initialize_model_parallel(2)
    total = all_reduce_of(2**rank, parallel_state.get_data_parallel_group())
    parallel_state.destroy_model_parallel()
    return message, left, total


# The error names a rank that joins too late. No group is left, and a second try succeeds.
@pytest.mark.full
def test_late_rank_is_named():
    found = run_ranks(partial(one_rank_late, 3), 4)
    for rank, (message, left, total) in enumerate(found):
        assert left
        assert total == 0b101 << rank % 2
        assert rank == 3 or re.search(r"rank 3 .* did not join.* waited \d+\.\d s", message)
    assert "rank 3 (tp=1, cp=0, ep=0, dp=1, pp=0)" in found[1][0]
