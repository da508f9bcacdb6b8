"""Test that collectives of simulated ranks are recorded, and compared between all ranks."""

import contextlib
import itertools
import re

import pytest
import torch
import torch.distributed as dist
from group_checks import coalescing
from hypothesis import given, strategies as st
from torch.distributed import all_gather_object as bound_early, all_reduce as early_all_reduce

from hypercomm import HyperCommGrid, run_ranks
from hypercomm.errors import RankFailedError, SimulationError
from hypercomm.testing import simulate

# torch 2.13 has new names for some collectives, and warns about the old names.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


def own(size=2):
    return torch.full((size,), float(dist.get_rank()))


def slots(count=4):
    return [torch.full((2,), -1.0) for _ in range(count)]


def all_gathered():
    into = torch.zeros(8)
    listed = slots()
    dist.all_gather_into_tensor(into, own())
    dist.all_gather(listed, own())
    assert torch.equal(into, torch.cat(listed))
    return into[::2].tolist()


def reduce_scattered():
    out, listed = torch.zeros(2), torch.zeros(2)
    whole = torch.arange(8.0) + 10 * dist.get_rank()
    dist.reduce_scatter_tensor(out, whole)
    dist.reduce_scatter(listed, list(whole.split(2)), op=dist.ReduceOp.MAX)
    assert torch.equal(out, listed)
    return out.tolist()


def exchanged():
    into = torch.zeros(4)
    listed = slots()
    dist.all_to_all_single(into, own(4))
    dist.all_to_all(listed, [own()] * 4)
    return into.tolist(), listed[3].tolist()


def from_the_root(src):
    tensor = own()
    out = torch.full((2,), -1.0)
    listed = slots()
    parts = [torch.full((2,), 10.0 + rank) for rank in range(4)]
    dist.broadcast(tensor, src=src)
    dist.scatter(out, parts if dist.get_rank() == src else None, src=src)
    dist.gather(own(), listed if dist.get_rank() == src else None, dst=src)
    return tensor[1].item(), out[0].item(), listed[3][0].item()


def passed_on():
    rank = dist.get_rank()
    line, ring = torch.full((2,), -1.0), torch.full((2,), -1.0)
    if rank:
        dist.recv(line, rank - 1)
    if rank < 3:
        dist.send(own() + 5, rank + 1)
    ops = [
        dist.P2POp(dist.isend, own(), (rank + 1) % 4),
        dist.P2POp(dist.irecv, ring, (rank - 1) % 4),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return line[0].item(), ring[0].item()


def from_anyone():
    tensor = torch.full((2,), -1.0)
    sender = None
    if dist.get_rank() == 1:
        dist.send(own(), 3)
    elif dist.get_rank() == 3:
        sender = dist.recv(tensor)
    return sender, tensor[0].item()


def begun():
    tensor = own()
    into = torch.zeros(8)
    work = dist.all_reduce(tensor, async_op=True)
    assert isinstance(work, dist.Work)
    assert work.is_completed()
    assert work.get_future().value()[0] is tensor
    assert work.wait()
    with coalescing():
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    with coalescing(async_ops=True) as work:
        dist.all_gather_into_tensor(into, tensor)
    work.wait()
    return into[7].item()


def objects():
    rank = dist.get_rank()
    first = [rank, None]
    last = [rank]
    out = [None]
    every = [None] * 4
    dist.broadcast_object_list(first, src=0)
    dist.broadcast_object_list(last, src=3)
    dist.scatter_object_list(out, list("abcd") if rank == 1 else None, src=1)
    bound_early(every, {"rank": rank})
    dist.gather_object(rank, every if rank == 3 else None, dst=3)
    if rank == 1:
        dist.send_object_list(["x"], 2)
    elif rank == 2:
        assert dist.recv_object_list(last, src=1) == 1
    return first, last[0], out[0], every[0]


# Each collective works on every rank, and all ranks agree. The results are as documented: a rank
# receives the values of the ranks that ran before it. In place of the value of a later rank, it
# receives its own value.
@pytest.mark.parametrize(
    ("function", "args", "returned"),
    [
        (all_gathered, (), [[rank] * 4 for rank in range(4)]),
        (reduce_scattered, (), [[12.0 * rank, 12.0 * rank + 1] for rank in range(4)]),
        (exchanged, (), [([rank] * 4, [rank] * 2) for rank in range(4)]),
        (from_the_root, (0,), [(0, 10, 0), (0, 11, -1), (0, 12, -1), (0, 13, -1)]),
        (from_the_root, (2,), [(0, -1, -1), (1, -1, -1), (2, 12, 2), (2, 13, -1)]),
        (passed_on, (), [(-1, -1), (5, 0), (6, 1), (7, 2)]),
        (from_anyone, (), [(None, -1), (None, -1), (None, -1), (0, -1)]),
        (begun, (), [0, 1, 2, 3]),
        (objects, (), [([0, None], {2: "x", 3: 3}.get(rank), "aaabcd"[rank + 2] if rank else None,
                        {"rank": rank} if rank < 3 else 3) for rank in range(4)]),
    ],
)  # fmt: skip
def test_results_of_collectives(function, args, returned):
    got = simulate(function, 4, args=args)
    assert list(got.returned.values()) == returned
    got.check()


# Collectives are recorded in order, with their arguments and source line.
def test_recorded_collectives():
    def run():
        group = HyperCommGrid([2, 2], ["tp", "dp"]).create_pg("dp")
        early_all_reduce(torch.zeros(2, 3, dtype=torch.int64), op=dist.ReduceOp.MAX, group=group)
        dist.broadcast(torch.zeros(()), src=1)
        dist.monitored_barrier()
        dist.send(torch.zeros(1), (dist.get_rank() + 1) % 4, tag=3)
        dist.recv(torch.zeros(1), (dist.get_rank() - 1) % 4, tag=3)

    got = simulate(run, 4, backend="gloo")
    got.check()
    first, *others = got.collectives[1]
    place = f"{__file__}:{run.__code__.co_firstlineno + 2}"
    assert (first.op, first.shapes, first.dtype) == ("all_reduce", ((2, 3),), "int64")
    assert (first.reduction, first.peer, first.place) == ("max", None, place)
    assert (first.group.called, tuple(first.group.ranks)) == ("dp", (1, 3))
    assert [(one.op, one.shapes, one.peer, one.tag) for one in others] == [
        ("broadcast", ((),), 1, 0),
        ("monitored_barrier", (), None, 0),
        ("send", ((1,),), 2, 3),
        ("recv", ((1,),), 0, 3),
    ]
    assert str(others[2]).startswith("send of float32[1] to rank 2 with tag 3 at test_")
    assert others[0].group.called == "WORLD"
    assert "2 process groups, 1 on each rank; 5 collectives on each" in str(got)


def swaps(odd, tp):
    for group in [None, tp] if odd else [tp, None]:
        dist.all_reduce(torch.zeros(4), group=group)


# A simulation finds each mistake of rank 5 and names the rank. Ranks 4 and 5 are a tp group.
@pytest.mark.parametrize(
    ("program", "differs"),
    [
        (swaps, ()),
        (lambda odd, tp: dist.all_reduce(own().to([torch.half, torch.int8][odd]), group=tp),
         ("float16[2]", "int8[2]")),
        (lambda odd, tp: dist.all_reduce(own(), [dist.ReduceOp.MIN, dist.ReduceOp.MAX][odd], tp),
         ("(min)", "(max)")),
        (lambda odd, tp: dist.broadcast(own(), group_src=int(odd), group=tp),
         ("from rank 4", "from rank 5")),
        (lambda odd, tp: dist.all_gather([own(1), own(2 + odd)], own(1), group=tp),
         ("float32[1], [2]", "float32[1], [3]")),
        (lambda odd, tp: dist.all_to_all_single(own(4 + 2 * odd), own(4 + 2 * odd), group=tp),
         ("float32[4]", "float32[6]")),
        (lambda odd, tp: dist.broadcast_object_list([None] * (1 + odd), group_src=0, group=tp),
         ("objects[1]", "objects[2]")),
        (lambda odd, tp: dist.barrier(tp) if odd else dist.all_reduce(own(), group=tp),
         ("all_reduce of float32[2] (sum)", "barrier")),
    ],
)  # fmt: skip
def test_mistake_of_one_rank_is_named(program, differs):
    def run(odd_rank):
        tp = HyperCommGrid([2, 4], ["tp", "dp"]).create_pg("tp")
        program(dist.get_rank() == odd_rank, tp)

    got = simulate(run, 8, args=(5,))
    (one,) = [one for one in got.disagreements if one.group.ranks == (4, 5)]
    assert one.number == 1
    assert one.waiting == ((4, 5) if differs else (4,))
    if not differs:
        assert re.fullmatch(r"waits in all_reduce on WORLD at test_\w+.py:\d+", one.absent[5])
        assert ": rank 4 waits for rank 5, which waits in all_reduce on WORLD" in str(one)
    for rank, text, part in zip((4, 5), one.differs.split("; "), differs, strict=False):
        assert text.startswith(f"rank {rank} calls ")
        assert part in text
    with pytest.raises(SimulationError, match=r"\n\d disagreements?:"):
        got.check()
    simulate(run, 8, args=(None,)).check()
    assert simulate(run, 8, args=(5,), ranks=[6, 7]).disagreements == ()


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
        works = [
            dist.all_reduce(own(4 + (rank == 2)), group=three, async_op=True) for _ in range(calls)
        ]
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


# Values of other ranks are not used if they belong to a different call or to another kind of
# tensor. The splits of an all-to-all may differ between ranks.
def test_values_of_other_ranks():
    def run():
        rank = dist.get_rank()
        tensor = torch.full((2,), 7) if rank else torch.full((2,), 1.5)
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [2, 2], [1 + rank, 3 - rank])
        dist.broadcast(tensor, src=0)
        return tensor.tolist()

    got = simulate(run, 2)
    assert got.returned[1] == [7, 7]
    assert [one.number for one in got.disagreements] == [2]


def message(call, peer, size=1, tag=0):
    return lambda: call(torch.zeros(size), peer, tag=tag)


SEND, RECV = [message(dist.send, 1)], [message(dist.recv, 0)]
NEVER_SENT, NEVER_RECEIVED = ((1,), {0: "never sends it"}), ((0,), {1: "never receives it"})


# A simulation finds sends without a receive, receives without a send, and messages that wait for
# each other. Messages do not count as collectives of their group. Nothing is known about a rank
# that is not simulated.
@pytest.mark.parametrize(
    ("steps", "simulated", "found"),
    [
        ((SEND, []), [0, 2], [NEVER_RECEIVED]),
        (([], [message(dist.irecv, 0)]), [1, 2], [NEVER_SENT]),
        (([message(dist.send, 1, 4)] * 2, [message(dist.recv, 0, 5)] * 2), [0, 2], [((0, 1), {})]),
        (
            ([message(dist.recv, 1), *SEND], [*RECV, message(dist.send, 0)]),
            [1, 2],
            [((rank,), {1 - rank: "waits in recv on WORLD"}) for rank in range(2)],
        ),
        (
            ([message(dist.send, 1, tag=3)], [message(dist.irecv, 0, tag=4)]),
            [0, 2],
            [NEVER_RECEIVED, NEVER_SENT],
        ),
        (
            (SEND, [*RECV, dist.barrier], [dist.barrier]),
            [1, 2],
            [((1, 2), {0: "never calls it"})],
        ),
    ],
)
def test_unmatched_messages_are_found(steps, simulated, found):
    def run():
        for step in dict(enumerate(steps)).get(dist.get_rank(), ()):
            step()

    got = simulate(run, 3).disagreements
    absent = [{rank: why.partition(" at ")[0] for rank, why in one.absent.items()} for one in got]
    assert list(zip([one.waiting for one in got], absent, strict=True)) == found
    assert simulate(run, 3, ranks=simulated).disagreements == ()


# A simulation also finds a group creation and a collective that wait for each other.
def test_creation_and_barrier_wait_for_each_other():
    def run():
        grid = HyperCommGrid([2, 2], ["tp", "dp"])
        steps = [dist.barrier, lambda: grid.create_pg("tp")]
        for step in steps[:: -1 if dist.get_rank() == 3 else 1]:
            step()

    one, other = simulate(run, 4).disagreements
    assert one.waiting == (0, 1, 2)
    assert one.absent == {3: "waits in tp"}
    assert other.waiting == (3,)
    assert other.absent.keys() == {2}
    assert other.absent[2].startswith("waits in barrier on WORLD at test_")


# If a real group rejects a call on this rank alone, the simulation also raises, and names the rank.
@pytest.mark.parametrize(
    "call",
    [
        lambda: dist.all_gather(slots(3), own()),
        lambda: dist.all_gather_into_tensor(torch.zeros(7), own()),
        lambda: dist.reduce_scatter_tensor(own(), torch.zeros(7)),
        lambda: dist.all_to_all_single(own(3), own(3)),
    ],
)
def test_invalid_calls_raise(call):
    with pytest.raises(RankFailedError) as error:
        simulate(call, 4)
    assert isinstance(error.value.__cause__, SimulationError)


WORLD = 6
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
    simulate(run_steps, WORLD, args=(steps, None, "", 0)).check()
    odd = data.draw(st.sampled_from(sorted({rank for step in steps for rank in GROUPS[step[0]]})))
    own_steps = [step for step in steps if odd in GROUPS[step[0]]]
    at = data.draw(st.integers(0, len(own_steps) - 1))
    change = data.draw(st.sampled_from(["skips", "size", "twice"]))
    got = simulate(run_steps, WORLD, args=(steps, odd, change, at))
    concerned = [one for one in got.disagreements if one.group.ranks == GROUPS[own_steps[at][0]]]
    assert any(odd in {*one.waiting, *one.absent} for one in concerned)


# gloo agrees with the simulation: real ranks fail if and only if the simulation finds a
# disagreement.
@pytest.mark.slow
@pytest.mark.parametrize("odd", [None, 1])
def test_simulation_agrees_with_gloo(odd):
    args = ([(5, 1, False), (2, 2, False), (0, 1, False)], odd, "skips", 1)
    differs = bool(simulate(run_steps, WORLD, args=args).disagreements)
    assert differs == (odd is not None)
    with pytest.raises(RankFailedError) if differs else contextlib.nullcontext():
        run_ranks(run_steps, WORLD, args=args, timeout=10)
