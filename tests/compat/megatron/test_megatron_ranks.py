"""Megatron's names on real gloo processes; the oracle says which ranks each group has."""

import re
from functools import partial

import pytest
from megatron_facts import state_of, theirs
from ranks import megatron_ranks

from hypercomm.compat.megatron.state import GLOBALS
from hypercomm.launch import run_ranks

# Every kind of group: instances, hierarchy, embedding ends, experts with other sizes, twins.
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
    """The sum of 2**member over each group that Megatron puts a rank in, by its global."""
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
    for name in list(sums):  # without GTP peers, what has them is what has none
        for end in ("_WITH_GTP_REMAT", "_WITH_EGTP"):
            if name + end in GLOBALS:
                sums.setdefault(name + end, sums[name])
    return sums


# Over and over: initialise with gloo twins, all-reduce over every group, destroy. What Megatron
# puts into a group takes part in its sums; groups, threads and files are back where they started.
@pytest.mark.full
@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arguments", [DENSE, EXPERTS])
def test_cycles(arguments, count):
    found = run_ranks(partial(megatron_ranks.cycles, count, arguments), 8, timeout=300)
    for rank, cycle in enumerate(found):
        assert cycle["sums"] == expected_sums(arguments, rank)
        assert cycle["always the same"]
        assert cycle["created"] > 20
        assert cycle["registered"]
        assert cycle["after"] == cycle["before"]


# Two states live side by side: `use` switches, nests, and is each thread's own.
def test_two_states():
    for rank, (answers, in_threads, default) in enumerate(run_ranks(megatron_ranks.two_states, 4)):
        wide, narrow = (4, 0b1111), (2, 0b11 << rank // 2 * 2)
        assert answers == [wide, narrow] * 3 + [narrow]
        assert in_threads == {"w": wide, "n": narrow}
        assert not default


# With share="identical" a rank has one group for each distinct set of ranks, and one more for the
# group that exists to overlap.
@pytest.mark.parametrize("arguments", [DENSE, EXPERTS])
def test_share_identical(arguments):
    found = run_ranks(partial(megatron_ranks.shared, arguments), 8)
    for rank, (sets, created, alone, sums, left) in enumerate(found):
        wanted = expected_sums(arguments, rank)
        assert sets == len(set(wanted.values()))
        assert created == sets + 1
        assert alone == ["_DATA_PARALLEL_GROUP_WITH_CP_AG"]
        assert sums == wanted
        assert left == 0


# After a mistake on one rank all ranks raise without waiting, and the next call by all succeeds.
def test_one_rank_differs():
    found = run_ranks(megatron_ranks.one_rank_differs, 4)
    for rank, (kind, took, left, total) in enumerate(found):
        assert kind == "PlanMismatchError"
        assert took < 10  # the timeout of a group is 30 minutes
        assert left
        assert total == 0b11 << rank // 2 * 2


# A rank that comes too late is named, nothing is left behind, and a second try works.
@pytest.mark.full
def test_a_late_rank():
    found = run_ranks(partial(megatron_ranks.one_rank_late, 3), 4)
    for rank, (said, left, total) in enumerate(found):
        assert left
        assert total == 0b101 << rank % 2
        assert rank == 3 or re.search(r"rank 3 .* did not join.* waited \d+\.\d s", said)
    assert "rank 3 (tp=1, cp=0, ep=0, dp=1, pp=0)" in found[1][0]


# megatron-core's own layers train to the same losses, bit for bit, on its state and on ours.
@pytest.mark.clients
def test_layers_train_alike():
    arguments = {"tensor_model_parallel_size": 2}
    on_theirs = run_ranks(partial(megatron_ranks.train, arguments, False), 4)
    on_ours = run_ranks(partial(megatron_ranks.train, arguments, True), 4)
    assert {name for name, _ in on_theirs} == {"megatron.core.parallel_state"}
    assert {name for name, _ in on_ours} == {"hypercomm.compat.megatron.parallel_state"}
    assert [losses for _, losses in on_theirs] == [losses for _, losses in on_ours]
    assert on_ours[0][1] != on_ours[2][1]  # other data, so the test can fail
