"""Test that collectives of simulated ranks are recorded, and compared between all ranks."""

import pytest
import torch
import torch.distributed as dist
from group_checks import coalescing
from torch.distributed import all_gather_object as bound_early, all_reduce as early_all_reduce

from hypercomm import HyperCommGrid
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
