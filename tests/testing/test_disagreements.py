"""Test that simulate() finds calls of the ranks that differ or never end, and describes them."""

import contextlib
import graphlib
import itertools
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

from hypercomm import HyperCommGrid, run_ranks
from hypercomm.errors import RankFailedError, SimulationError
from hypercomm.testing import simulate

# torch 2.13 has new names for some collectives, and warns about the old names.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

# ---- one mistake of rank 3 -----------------------------------------------------------------------

GLOO, MINUTE = {"backend": "gloo"}, {"timeout": timedelta(minutes=1)}
MIN, MAX = dist.ReduceOp.MIN, dist.ReduceOp.MAX


def tensor(size=2, dtype=None):
    return torch.zeros(size, dtype=dtype)


def creates(*calls):
    """Create groups of a grid, from dims and options."""
    grid = HyperCommGrid("tp=2,dp=2")
    for dims, options in calls:
        grid.create_pg(dims, **options)


# Each call differs between rank 2 and rank 3, which are a tp group.
@pytest.mark.parametrize(
    ("call", "of_two", "of_three"),
    [
        (lambda odd, tp: dist.barrier(tp) if odd else dist.all_reduce(tensor(), group=tp),
         "all_reduce of float32[2] (sum)", "barrier"),
        (lambda odd, tp: dist.all_reduce(tensor(2, [torch.half, torch.int8][odd]), group=tp),
         "all_reduce of float16[2] (sum)", "all_reduce of int8[2] (sum)"),
        (lambda odd, tp: dist.all_reduce(tensor(), [MIN, MAX][odd], tp),
         "all_reduce of float32[2] (min)", "all_reduce of float32[2] (max)"),
        (lambda odd, tp: dist.broadcast(tensor(), group_src=int(odd), group=tp),
         "broadcast of float32[2] from rank 2", "broadcast of float32[2] from rank 3"),
        (lambda odd, tp: dist.all_gather([tensor(1), tensor(2 + odd)], tensor(1), group=tp),
         "all_gather of float32[1], [2]", "all_gather of float32[1], [3]"),
        (lambda odd, tp: dist.all_to_all_single(tensor(4 + 2 * odd), tensor(4 + 2 * odd), group=tp),
         "all_to_all_single of float32[4]", "all_to_all_single of float32[6]"),
        (lambda odd, tp: dist.broadcast_object_list([None] * (1 + odd), group_src=0, group=tp),
         "broadcast_object_list of objects[1] from rank 2",
         "broadcast_object_list of objects[2] from rank 2"),
    ],
)  # fmt: skip
def test_different_calls(call, of_two, of_three):
    def program(odd):
        call(odd, HyperCommGrid("tp=2,dp=2").create_pg("tp"))

    check(program, [f"call 1 on {TP}: rank 2 calls {of_two}; rank 3 calls {of_three}"])


def swapped(*steps):
    """Let each rank make two calls, and rank 3 in the other order."""
    return lambda odd: [step() for step in steps[:: -1 if odd else 1]]


def messages(of_two, of_three, of_odd):
    """Let ranks 2 and 3 exchange messages, given as pairs of call and tag."""

    def program(odd):
        rank = dist.get_rank()
        for call, tag in {2: of_two, 3: of_odd if odd else of_three}.get(rank, ()):
            call(tensor(1), 5 - rank, tag=tag)

    return program


def meets_after_a_message(odd):
    messages([SEND], [RECV], [RECV])(odd)
    if not odd:
        dist.barrier()


def reduces_over_both(odd):
    tp = HyperCommGrid("tp=2,dp=2").create_pg("tp")
    for group in [None, tp] if odd else [tp, None]:
        dist.all_reduce(tensor(), group=group)


SEND, RECV, IRECV = (dist.send, 0), (dist.recv, 0), (dist.irecv, 0)
SUM = "all_reduce of float32[2] (sum)"
SENT, RECEIVED = "send of float32[1] to rank 3", "recv of float32[1] from rank"
TP, WORLD = "tp of ranks (2, 3)", "call 1 on WORLD of ranks (0, 1, 2, 3)"
TWO, THREE = "rank 2 waits for rank 3, which", "rank 3 waits for rank 2, which"
MADE = f"{TP}: rank 2 creates {TP} with nccl and a timeout of 0:10:00; rank 3 creates {TP}"


# In each program, rank 3 makes a mistake. Both ranks of a circle are named. Messages do not count
# as collectives of their group.
@pytest.mark.parametrize(
    ("program", "found"),
    [
        (lambda odd: creates(*([] if odd else [("tp", {})])), [f"{TP}: {TWO} never creates it"]),
        (lambda odd: creates(*[("tp", {}), (["tp", "dp"], {})][:: -1 if odd else 1]),
         ["tp+dp of ranks (0, 1, 2, 3): ranks 0, 1, 3 wait for rank 2, which waits in tp",
          f"{TP}: {TWO} waits in tp+dp"]),
        (lambda odd: creates(("tp", GLOO if odd else {})),
         [f"{MADE} with gloo and a timeout of 0:10:00"]),
        (lambda odd: creates(("tp", MINUTE if odd else {})),
         [f"{MADE} with nccl and a timeout of 0:01:00"]),
        (reduces_over_both,
         [f"{WORLD}, {SUM}: ranks 0, 1, 3 wait for rank 2, which waits in all_reduce on tp",
          f"call 1 on {TP}, {SUM}: {TWO} waits in all_reduce on WORLD"]),
        (swapped(dist.barrier, lambda: creates(("tp", {}))),
         [f"{WORLD}, barrier: ranks 0, 1, 2 wait for rank 3, which waits in tp",
          f"{TP}: {THREE} waits in barrier on WORLD"]),
        (meets_after_a_message,
         [f"{WORLD}, barrier: ranks 0, 1, 2 wait for rank 3, which never calls it"]),
        (messages([SEND], [RECV], []), [f"{WORLD}, {SENT}: {TWO} never receives it"]),
        (messages([IRECV], [SEND], []), [f"{WORLD}, {RECEIVED} 3: {TWO} never sends it"]),
        (messages([SEND], [IRECV], [(dist.irecv, 4)]),
         [f"{WORLD}, {SENT}: {TWO} never receives it",
          f"{WORLD}, {RECEIVED} 2 with tag 4: {THREE} never sends it"]),
        (messages([RECV, SEND], [SEND, RECV], [RECV, SEND]),
         [f"{WORLD}, {RECEIVED} 3: {TWO} waits in recv on WORLD",
          f"{WORLD}, {RECEIVED} 2: {THREE} waits in recv on WORLD"]),
    ],
)  # fmt: skip
def test_mistake_of_one_rank(program, found):
    check(program, found)


# A message whose sizes differ is one disagreement.
def test_sizes_of_a_message():
    def program(odd):
        if dist.get_rank() == 2:
            dist.send(tensor(1), 3, tag=4)
        elif dist.get_rank() == 3:
            dist.recv(tensor(1 + odd), 2, tag=4)

    received = "recv of float32[2] from rank 2 with tag 4"
    check(program, [f"{WORLD}: rank 2 calls {SENT} with tag 4; rank 3 calls {received}"])


def check(program, found):
    """Compare the disagreements of a program in which rank 3 makes a mistake.

    Without the mistake, all ranks agree. Nothing is known about ranks that are not simulated.
    """

    def run(odd):
        program(dist.get_rank() == odd)

    simulate(run, 4, args=(None,)).check()
    got = simulate(run, 4, args=(3,))
    assert [re.sub(r" at test_\w+\.py:\d+", "", str(one)) for one in got.disagreements] == found
    with pytest.raises(SimulationError, match=r"\n\d disagreements?:"):
        got.check()
    for ranks in ([0, 1], [2], [3]):
        assert simulate(run, 4, args=(3,), ranks=ranks).disagreements == ()


# ---- programs of several groups -----------------------------------------------------------------


# With use_local_synchronization=True, torch names a group by how many groups the rank has created.
# Therefore ranks with different memberships hang (pytorch issue 173608). Simulations find the hang.
def test_uneven_memberships_in_torch_disagree():
    def theirs():
        if dist.get_rank() in (0, 3):
            dist.new_group([0, 3], use_local_synchronization=True)
        dist.new_group([0, 1, 2, 3], use_local_synchronization=True)

    wrong = simulate(theirs, 4)
    assert {one.waiting for one in wrong.disagreements} == {(0, 3), (1, 2)}
    assert all(set(one.absent.values()) == {"never creates it"} for one in wrong.disagreements)
    with pytest.raises(SimulationError, match="2 disagreements"):
        wrong.check()


# The difference names the ranks whose calls differ, the minority first, even if a third rank is
# absent. Consequences are not reported. Here, rank 3 waits for rank `begins_two`, which has begun
# two calls and waits for the second call.
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("begins_two", [0, 2])
def test_only_the_first_difference_is_reported(begins_two, absent):
    def run():
        rank = dist.get_rank()
        three, pair = dist.new_group([0, 1, 2]), dist.new_group([begins_two, 3])
        calls = {begins_two: 2, 1: 0 if absent else 1, 3: 0}.get(rank, 1)
        own = tensor(4 + (rank == 2))
        works = [dist.all_reduce(own, group=three, async_op=True) for _ in range(calls)]
        if rank in (begins_two, 3):
            dist.barrier(pair)
        for work in works[-1:]:
            work.wait()
        if rank in (begins_two, 3):
            dist.barrier(pair)

    (one,) = simulate(run, 4).disagreements
    assert one.waiting == ((0, 2) if absent else (0, 1, 2))
    assert one.calls[2].shapes == ((5,),)
    assert absent or re.match(r"rank 2 calls .*\[5\].*; ranks 0, 1 call .*\[4\]", one.differs)


# Each rank calls barriers in a random order. The ranks finish if and only if the orders have no
# cycle.
@given(st.data())
def test_cycles_of_barriers_are_found(data):
    world = range(data.draw(st.integers(2, 5)))
    sets = [ranks for size in (2, 3) for ranks in itertools.combinations(world, size)]
    members = data.draw(st.lists(st.sampled_from(sets), min_size=1, max_size=5))
    orders = {}
    graph = graphlib.TopologicalSorter()
    for rank in world:
        own = [number for number, ranks in enumerate(members) if rank in ranks]
        orders[rank] = data.draw(st.permutations(own))
        for one, following in itertools.pairwise(orders[rank]):
            graph.add(following, one)
    try:
        graph.prepare()
        works = True
    except graphlib.CycleError:
        works = False

    def run():
        groups = [dist.new_group(ranks) for ranks in members]
        for number in orders[dist.get_rank()]:
            dist.barrier(groups[number])

    found = simulate(run, len(world)).disagreements
    assert works == (found == ())
    for one in found:
        assert one.absent
        assert sorted([*one.waiting, *one.absent]) == list(one.group.ranks)


SIZE = 6
GROUPS = [(0, 1, 2), (3, 4, 5), (0, 3), (1, 4), (2, 5), tuple(range(6))]
STEPS = st.lists(
    st.tuples(st.integers(0, len(GROUPS) - 1), st.integers(1, 3), st.booleans()),
    min_size=1,
    max_size=12,
)


def run_steps(steps, odd, change, at):
    """Call the steps of this rank. Rank `odd` makes `change` in its step with index `at`."""
    groups = [dist.new_group(ranks) for ranks in GROUPS]
    rank = dist.get_rank()
    mine = itertools.count()
    for number, size, begins in steps:
        if rank not in GROUPS[number]:
            continue
        here = change if rank == odd and next(mine) == at else ""
        if here == "skips":
            continue
        if here == "twice":
            dist.all_reduce(torch.zeros(size), group=groups[number])
        tensor = torch.zeros(size + (here == "size"))
        work = dist.all_reduce(tensor, group=groups[number], async_op=True)
        if not begins:
            work.wait()


# Ranks with the same calls agree. If one rank makes one change, a disagreement names that rank.
@given(st.data())
def test_random_programs(data):
    steps = data.draw(STEPS)
    simulate(run_steps, SIZE, args=(steps, None, "", 0)).check()
    odd = data.draw(st.sampled_from(sorted({rank for step in steps for rank in GROUPS[step[0]]})))
    own_steps = [step for step in steps if odd in GROUPS[step[0]]]
    at = data.draw(st.integers(0, len(own_steps) - 1))
    change = data.draw(st.sampled_from(["skips", "size", "twice"]))
    got = simulate(run_steps, SIZE, args=(steps, odd, change, at))
    concerned = [one for one in got.disagreements if one.group.ranks == GROUPS[own_steps[at][0]]]
    assert any(odd in {*one.waiting, *one.absent} for one in concerned)


# gloo agrees with the simulation: real ranks fail if and only if the simulation finds a
# disagreement.
@pytest.mark.slow
@pytest.mark.parametrize("odd", [None, 1])
def test_simulation_agrees_with_gloo(odd):
    args = ([(5, 1, False), (2, 2, False), (0, 1, False)], odd, "skips", 1)
    differs = bool(simulate(run_steps, SIZE, args=args).disagreements)
    assert differs == (odd is not None)
    with pytest.raises(RankFailedError) if differs else contextlib.nullcontext():
        run_ranks(run_steps, SIZE, args=args, timeout=10)
