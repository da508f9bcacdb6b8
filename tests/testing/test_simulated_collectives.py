"""What simulated ranks call: recorded, and compared over all of them."""

import itertools
import operator
import re
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import all_gather_object as bound_early
from torch.distributed import all_reduce as early_all_reduce
from torch.distributed import barrier as early_barrier

from hypercomm import HyperCommGrid
from hypercomm.compat.megatron import parallel_state as mpu
from hypercomm.errors import RankFailedError, SimulationError
from hypercomm.testing import run_ranks, simulate

# torch 2.13 has further names for some collectives, and warns of the old ones.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


def own(size=2):
    return torch.full((size,), float(dist.get_rank()))


def slots(count=4):
    return [torch.full((2,), -1.0) for _ in range(count)]


def all_gathered():
    into = torch.zeros(8)
    dist.all_gather_into_tensor(into, own())
    listed = slots()
    dist.all_gather(listed, own())
    assert torch.equal(into, torch.cat(listed))
    return into[0].item(), into[7].item()


def reduce_scattered():
    out, listed = torch.zeros(2), torch.zeros(2)
    whole = torch.arange(8.0) + 10 * dist.get_rank()
    dist.reduce_scatter_tensor(out, whole)
    dist.reduce_scatter(listed, list(whole.split(2)), op=dist.ReduceOp.MAX)
    assert torch.equal(out, listed)
    return tuple(out.tolist())


def exchanged():
    into, listed = torch.zeros(4), slots()
    dist.all_to_all_single(into, own(4))
    dist.all_to_all(listed, [own()] * 4)
    return into[0].item(), listed[3][1].item()


def scattered(src):
    out = torch.full((2,), -1.0)
    parts = [torch.full((2,), 10.0 + rank) for rank in range(4)]
    dist.scatter(out, parts if dist.get_rank() == src else None, src=src)
    return out[0].item()


def broadcast(src):
    tensor = own()
    dist.broadcast(tensor, src=src)
    return tensor[1].item()


def gathered():
    listed = slots()
    dist.gather(own(), listed if dist.get_rank() == 2 else None, dst=2)
    return [slot[0].item() for slot in listed]


def passed_on():
    tensor = torch.full((2,), -1.0)
    rank = dist.get_rank()
    if rank:
        dist.recv(tensor, rank - 1)
    if rank < 3:
        dist.send(own() + 5, rank + 1)
    return tensor[0].item()


def in_a_ring():
    rank, tensor = dist.get_rank(), torch.full((2,), -1.0)
    ops = [
        dist.P2POp(dist.isend, own(), (rank + 1) % 4),
        dist.P2POp(dist.irecv, tensor, (rank - 1) % 4),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return tensor[0].item()


def from_anyone():
    tensor, sender = torch.full((2,), -1.0), None
    if dist.get_rank() == 1:
        dist.send(own(), 3)
    elif dist.get_rank() == 3:
        sender = dist.recv(tensor)
    return sender, tensor[0].item()


def begun():
    tensor = own()
    work = dist.all_reduce(tensor, async_op=True)
    assert work.is_completed()
    assert work.get_future().value()[0] is tensor
    assert work.wait()
    assert isinstance(work, dist.Work)
    return tensor[0].item()


def together():
    tensor, into = own(), torch.zeros(8)
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as work:
        dist.all_gather_into_tensor(into, tensor)
    work.wait()
    return into[7].item()


def objects():
    rank = dist.get_rank()
    first, last, out, every = [rank, None], [rank], [None], [None] * 4
    dist.broadcast_object_list(first, src=0)
    dist.broadcast_object_list(last, src=3)
    dist.scatter_object_list(out, list("abcd") if rank == 1 else None, src=1)
    bound_early(every, {"rank": rank})
    dist.gather_object(rank, every if rank == 3 else None, dst=3)
    return first, last[0], out[0], every[0]


def objects_passed_on():
    received = [None]
    if dist.get_rank() == 1:
        dist.send_object_list(["x"], 2)
    elif dist.get_rank() == 2:
        assert dist.recv_object_list(received, src=1) == 1
    return received[0]


# Each works on every rank, agrees, and leaves what is documented: what came from a rank that ran
# before, and what is this rank's own in the place of what comes later.
@pytest.mark.parametrize(
    ("function", "args", "returned"),
    [
        (all_gathered, (), [(rank, rank) for rank in range(4)]),
        (reduce_scattered, (), [(12.0 * rank, 12.0 * rank + 1) for rank in range(4)]),
        (exchanged, (), [(rank, rank) for rank in range(4)]),
        (scattered, (0,), [10, 11, 12, 13]),
        (scattered, (2,), [-1, -1, 12, 13]),
        (broadcast, (0,), [0, 0, 0, 0]),
        (broadcast, (2,), [0, 1, 2, 2]),
        (gathered, (), [[-1] * 4, [-1] * 4, [2] * 4, [-1] * 4]),
        (passed_on, (), [-1, 5, 6, 7]),
        (in_a_ring, (), [-1, 0, 1, 2]),
        (from_anyone, (), [(None, -1), (None, -1), (None, -1), (0, -1)]),
        (begun, (), [0, 1, 2, 3]),
        (together, (), [0, 1, 2, 3]),
        (objects, (), [([0, None], 3 if rank == 3 else None, "aaabcd"[rank + 2] if rank else None,
                        {"rank": rank} if rank < 3 else 3) for rank in range(4)]),
        (objects_passed_on, (), [None, None, "x", None]),
    ],
)  # fmt: skip
def test_what_is_left(function, args, returned):
    got = simulate(function, 4, args=args)
    assert list(got.returned.values()) == returned
    got.check()


# What was called is there in order, with all that matters and the place.
def test_what_is_recorded():
    def run():
        group = HyperCommGrid([2, 2], ["tp", "dp"]).create_pg("dp")
        early_all_reduce(torch.zeros(2, 3, dtype=torch.int64), op=dist.ReduceOp.MAX, group=group)
        dist.broadcast(torch.zeros(()), src=1)
        dist.monitored_barrier()
        early_barrier(async_op=True).wait()
        dist.all_to_all_single(torch.zeros(2), torch.zeros(2), [1, 1], [1, 1], group)

    got = simulate(run, 4, backend="gloo")
    first, *others = got.collectives[1]
    place = f"test_simulated_collectives.py:{run.__code__.co_firstlineno + 2}"
    assert str(first) == f"all_reduce of int64[2, 3] (max) at {place}"
    assert (first.group.called, tuple(first.group.ranks)) == ("dp", (1, 3))
    assert first.place.endswith(place)
    assert [str(one).partition(" at ")[0] for one in others] == [
        "broadcast of float32[] from rank 1",
        "monitored_barrier",
        "barrier",
        "all_to_all_single of float32[]",
    ]
    assert others[-1].sends == others[-1].receives == (1, 1)
    assert others[0].group.called == "WORLD"
    assert len(got.collectives) == 4
    assert "2 process groups, 1 on each rank; 5 collectives on each" in str(got)


# A second job of the ranks has a WORLD of its own.
def test_a_second_world():
    def run():
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        dist.all_reduce(torch.zeros(1))

    got = simulate(run, 4)
    got.check()
    assert [one.group.called for one in got.collectives[2]] == ["WORLD", "WORLD (job 2)"]


def skips(odd, tp, dp):
    if not odd:
        dist.all_reduce(torch.zeros(4), group=tp)
    dist.barrier(group=dp)


def swaps(odd, tp, _dp):
    for group in [None, tp] if odd else [tp, None]:
        dist.all_reduce(torch.zeros(4), group=group)


def one_more(odd, tp, dp):
    for _ in range(3 if odd else 2):
        dist.all_reduce(torch.zeros(4), group=tp)
    dist.barrier(group=dp)


def in_one(call):
    return lambda odd, tp, _dp: call(odd, tp)


# Each mistake of rank 5 is found and named; of ranks 4 and 5, which are a tp group.
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (skips, ("call 1 on tp of ranks (4, 5), all_reduce of float32[4] (sum): rank 4 waits for "
                "rank 5, which never calls it")),
        (swaps, ("call 1 on tp of ranks (4, 5), all_reduce of float32[4] (sum): "
                "rank 4 waits for rank 5, which waits in all_reduce on WORLD")),
        (one_more, ("call 3 on tp of ranks (4, 5), all_reduce of float32[4] (sum): "
                   "rank 5 waits for rank 4, which never calls it")),
        (in_one(lambda odd, tp: dist.all_reduce(torch.zeros(4 + odd), group=tp)),
         ("call 1 on tp of ranks (4, 5): rank 4 calls all_reduce of float32[4] (sum); "
         "rank 5 calls all_reduce of float32[5] (sum)")),
        (in_one(lambda odd, tp: dist.all_reduce(torch.zeros(4).to(
            torch.float64 if odd else torch.float32), group=tp)),
         "rank 4 calls all_reduce of float32[4] (sum); rank 5 calls all_reduce of float64[4]"),
        (in_one(lambda odd, tp: dist.all_reduce(
            torch.zeros(1), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.MIN, group=tp)),
         "all_reduce of float32[1] (min); rank 5 calls all_reduce of float32[1] (max)"),
        (in_one(lambda odd, tp: dist.broadcast(
            torch.zeros(1), src=dist.get_process_group_ranks(tp)[odd], group=tp)),
         "broadcast of float32[1] from rank 4; rank 5 calls broadcast of float32[1] from rank 5"),
        (in_one(lambda odd, tp: dist.barrier(tp) if odd else dist.all_reduce(own(), group=tp)),
         "rank 4 calls all_reduce of float32[2] (sum); rank 5 calls barrier"),
        (in_one(lambda odd, tp: dist.all_gather(
            [torch.zeros(1), torch.zeros(2 + odd)], torch.zeros(1), group=tp)),
         "rank 4 calls all_gather of float32[1], [2]; rank 5 calls all_gather of float32[1], [3]"),
        (in_one(lambda odd, tp: dist.broadcast_object_list(
            [None] * (1 + odd), group_src=0, group=tp)),
         ("broadcast_object_list of objects[1] from rank 4; rank 5 calls broadcast_object_list of "
         "objects[2] from rank 4")),
        (in_one(lambda odd, tp: dist.all_to_all_single(
            torch.zeros(4), torch.zeros(4), [2, 2], [3, 1] if odd else [2, 2], tp)),
         "all_to_all_single of float32[]: rank 5 sends 3 to rank 4, which receives 2"),
        (in_one(lambda odd, tp: dist.all_to_all(
            [torch.zeros(1), torch.zeros(1)], [torch.zeros(1), torch.zeros(1 + odd)], tp)),
         "all_to_all of float32: rank 5 sends (2,) to rank 5, which receives (1,)"),
    ],
)  # fmt: skip
def test_one_rank_differs(program, words):
    def run(odd_rank):
        grid = HyperCommGrid([2, 4], ["tp", "dp"])
        program(dist.get_rank() == odd_rank, *grid.create_pgs(["tp", "dp"]))

    got = simulate(run, 8, args=(5,))
    told = [re.sub(r" at [\w.]+:\d+", "", str(one)) for one in got.disagreements]
    assert sum(words in one for one in told) == 1, told
    assert len(told) <= 3
    with pytest.raises(SimulationError, match=r"^\d disagreements?:"):
        got.check()
    simulate(run, 8, args=(None,)).check()
    assert simulate(run, 8, args=(5,), ranks=[6, 7]).disagreements == ()


# Of three calls or more, the odd ranks come first.
def test_who_is_odd():
    def run():
        dist.all_reduce(torch.zeros(9 if dist.get_rank() == 2 else 4))
        dist.all_reduce(torch.zeros(dist.get_rank()))  # follows, and is not told

    (one,) = simulate(run, 8).disagreements
    words = "rank 2 calls all_reduce of float32[9] (sum) at "
    assert words in str(one)
    assert "; ranks 0, 1, 3, 4 and 3 more call all_reduce of float32[4]" in str(one)
    assert (one.number, one.waiting, one.absent) == (1, tuple(range(8)), {})
    assert one.calls[2].shapes == ((9,),)


# Ranks whose calls differ are told though a third one never comes, and what follows is not: rank 3
# would wait for the one otherwise that has begun two calls and waits for the second.
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("begins_two", [0, 2])
def test_only_the_first_difference(begins_two, absent):
    def run():
        rank = dist.get_rank()
        three, pair = dist.new_group([0, 1, 2]), dist.new_group([begins_two, 3])
        calls = {begins_two: 2, 1: 0 if absent else 1, 3: 0}.get(rank, 1)
        works = [
            dist.all_reduce(torch.zeros(4 + rank), group=three, async_op=True) for _ in range(calls)
        ]
        if rank in (begins_two, 3):
            dist.barrier(pair)
        for work in works[-1:]:
            work.wait()
        if rank in (begins_two, 3):
            dist.barrier(pair)

    (one,) = simulate(run, 4).disagreements
    assert one.waiting == ((0, 2) if absent else (0, 1, 2))
    assert "rank 2 calls all_reduce of float32[6] (sum)" in str(one)


# Messages on a group are no collectives of it; those of ranks that are not simulated come.
def test_messages_beside_collectives():
    def run():
        rank = dist.get_rank()
        if rank == 0:
            dist.send(torch.zeros(1), 1)
        elif rank == 1:
            dist.recv(torch.zeros(1), 0)
        if rank:
            dist.barrier()

    (one,) = simulate(run, 3).disagreements
    assert one.absent == {0: "never calls it"}
    simulate(run, 3, ranks=[1, 2]).check()


# What another call or another kind of tensor was given is not taken.
def test_values_of_others():
    def run():
        odd = dist.get_rank() == 1
        one, two = (torch.full((2,), 7 if odd else 1.5).to(torch.int64 if odd else torch.float32)
                    for _ in range(2))  # fmt: skip
        dist.broadcast(one, src=0)
        if odd:
            dist.recv(two, 0)
        else:
            dist.send(two, 1)
        return one.tolist() + two.tolist()

    got = simulate(run, 2)
    assert got.returned[1] == [7] * 4
    assert len(got.disagreements) == 2


def ahead(rank):
    if rank == 0:
        dist.send(torch.zeros(1), 1)


def other_size(rank):
    for _ in range(2):
        if rank == 0:
            dist.send(torch.zeros(4), 1)
        elif rank == 1:
            dist.recv(torch.zeros(5), 0)


def behind(rank):
    if rank == 1:
        dist.irecv(torch.zeros(1), 0)


def both_receive(rank):
    if rank < 2:
        dist.recv(torch.zeros(1), 1 - rank)
        dist.send(torch.zeros(1), 1 - rank)


def other_tag(rank):
    if rank == 0:
        dist.send(torch.zeros(1), 1, tag=3)
    elif rank == 1:
        dist.irecv(torch.zeros(1), 0, tag=4)


# Sends and receives without their other end, and those that wait for each other.
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (ahead, ["send of float32[1] to rank 1: rank 0 waits for rank 1, which never receives it"]),
        (behind, ["recv of float32[1] from rank 0: rank 1 waits for rank 0, which never sends it"]),
        (other_size, [("rank 0 calls send of float32[4] to rank 1; rank 1 calls recv of float32[5] "
                      "from rank 0")]),
        (both_receive, [f"recv of float32[1] from rank {1 - rank}: rank {rank} waits for rank "
                        f"{1 - rank}, which waits in recv on WORLD" for rank in range(2)]),
        (other_tag, ["with tag 3: rank 0 waits for rank 1, which never receives it",
                     "with tag 4: rank 1 waits for rank 0, which never sends it"]),
    ],
)  # fmt: skip
def test_messages_without_an_end(program, words):
    got = simulate(lambda: program(dist.get_rank()), 3)
    told = [re.sub(r" at [\w.]+:\d+", "", str(one)) for one in got.disagreements]
    assert len(told) == len(words)
    for one, expected in zip(told, words, strict=True):
        assert one.endswith(expected)
    # nobody knows what a rank that is not simulated does
    assert simulate(lambda: program(dist.get_rank()), 3, ranks=[0, 2]).disagreements == ()


# A rank waits for what it has begun where it says so, and not before.
@pytest.mark.parametrize("waits_early", [False, True])
def test_waiting_later(waits_early):
    def run():
        grid = HyperCommGrid([2, 2], ["tp", "dp"])
        groups = grid.create_pgs(["tp", "dp"])
        works = []
        for group in groups if dist.get_rank() in (0, 3) else reversed(groups):
            works.append(dist.all_reduce(own(), group=group, async_op=True))
            if waits_early:
                works.pop().wait()
        for work in works:
            work.wait()

    told = simulate(run, 4).disagreements
    assert bool(told) == waits_early
    if told:
        assert {one.group.called for one in told} == {"tp", "dp"}


# Creations and collectives wait for each other, too.
def test_a_creation_and_a_barrier():
    def run():
        grid = HyperCommGrid([2, 2], ["tp", "dp"])
        steps = [dist.barrier, lambda: grid.create_pg("tp")]
        for step in steps[:: -1 if dist.get_rank() == 3 else 1]:
            step()

    told = [str(one) for one in simulate(run, 4).disagreements]
    assert len(told) == 2
    assert "ranks 0, 1, 2 wait for rank 3, which waits in tp" in told[0]
    assert re.search("rank 3 waits for rank 2, which waits in barrier on WORLD at test_", told[1])


# What a real group refuses on this rank alone is refused here, with the rank.
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dist.all_gather(slots(3), own()), "all_gather needs 4 tensors"),
        (
            lambda: dist.all_gather_into_tensor(torch.zeros(7), own()),
            "needs 4 tensors of shape [2], or",
        ),
        (
            lambda: dist.reduce_scatter_tensor(own(), torch.zeros(7)),
            "needs 4 tensors of shape [2], or",
        ),
        (lambda: dist.all_to_all_single(own(3), own(3)), "needs 4 sizes with the sum 3"),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(RankFailedError, match=re.escape(words)) as error:
        simulate(call, 4)
    assert isinstance(error.value.__cause__, SimulationError)


# Parameters are filled though they have gradients, and tensors without storage work.
def test_kinds_of_tensors():
    def run():
        parameter = torch.nn.Parameter(own())
        dist.broadcast(parameter, src=0)
        dist.broadcast(torch.zeros(2, device="meta"), src=0)
        dist.all_reduce(torch.zeros(2, dtype=torch.complex64))
        return parameter.tolist()

    got = simulate(run, 2)
    assert got.returned == {0: [0, 0], 1: [0, 0]}
    assert got.collectives[1][2].shapes == ((2, 2),)


WORLD, GROUPS = 6, [(0, 1, 2), (3, 4, 5), (0, 3), (1, 4), (2, 5), tuple(range(6))]
STEPS = st.lists(
    st.tuples(st.integers(0, len(GROUPS) - 1), st.integers(1, 3), st.booleans()),
    min_size=1,
    max_size=12,
)


def run_steps(steps, odd, change, at):
    """Call the steps that this rank is in; rank `odd` does its step of the index `at` otherwise."""
    groups = [dist.new_group(ranks) for ranks in GROUPS]
    rank, mine = dist.get_rank(), itertools.count()
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


# Ranks that call the same agree; if one of them makes one change, it is named.
@given(st.data())
def test_any_program(data):
    steps = data.draw(STEPS)
    simulate(run_steps, WORLD, args=(steps, None, "", 0)).check()
    odd = data.draw(st.sampled_from(sorted({rank for step in steps for rank in GROUPS[step[0]]})))
    own_steps = [step for step in steps if odd in GROUPS[step[0]]]
    at = data.draw(st.integers(0, len(own_steps) - 1))
    change = data.draw(st.sampled_from(["skips", "size", "twice"]))
    got = simulate(run_steps, WORLD, args=(steps, odd, change, at))
    assert got.disagreements
    assert any(
        odd in one.waiting or odd in one.absent
        for one in got.disagreements
        if one.group.ranks == GROUPS[own_steps[at][0]]
    )


# gloo agrees with a simulation: what it names makes real ranks fail, and what it does not, works.
@pytest.mark.slow
@pytest.mark.parametrize("odd", [None, 1])
def test_beside_gloo(odd):
    steps = [(5, 1, False), (2, 2, False), (0, 1, False)]
    is_right = not simulate(run_steps, WORLD, args=(steps, odd, "skips", 1)).disagreements
    assert is_right == (odd is None)
    options = {"args": (steps, odd, "skips", 1), "timeout": 10}
    if is_right:
        run_ranks(run_steps, WORLD, **options)
    else:
        with pytest.raises(RankFailedError):
            run_ranks(run_steps, WORLD, **options)


def start_up(odd=None):
    """Begin as a program on Megatron does: arguments, groups, seeds, first calls, a pipeline."""
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    arguments = [{"lr": 1e-4} if rank == 0 else None]
    dist.broadcast_object_list(arguments, src=0)
    dist.barrier()
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=8,
        context_parallel_size=2,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
    )
    tp, dp, pp = (
        mpu.get_tensor_model_parallel_group(),
        mpu.get_data_parallel_group(with_context_parallel=True),
        mpu.get_pipeline_model_parallel_group(),
    )
    first = torch.zeros(1)
    for group in (tp, dp, pp, mpu.get_context_parallel_group(), mpu.get_model_parallel_group()):
        dist.all_reduce(first, group=group)
    dist.broadcast(torch.arange(8), mpu.get_tensor_model_parallel_src_rank(), group=tp)
    dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX)
    if not mpu.is_pipeline_first_stage():
        dist.recv(first, mpu.get_pipeline_model_parallel_prev_rank(), group=pp)
    if not mpu.is_pipeline_last_stage():
        dist.send(first, mpu.get_pipeline_model_parallel_next_rank(), group=pp)
    if rank != odd:
        dist.all_reduce(torch.ones(1), group=dp)
    dist.barrier()
    return arguments[0]["lr"]


def check_start_up(world_size):
    begin = time.process_time()
    got = simulate(start_up, world_size)
    print(f"{world_size:,} ranks of a start-up: {time.process_time() - begin:.1f} s of CPU")
    assert set(got.returned.values()) == {1e-4}
    got.check()
    assert sum(map(len, got.collectives.values())) == world_size * 11 + 2 * world_size * 7 // 8


# A program like Megatron's runs as it is; one rank that skips one call is found.
@pytest.mark.long
def test_a_start_up():
    check_start_up(128)
    got = simulate(start_up, 128, args=(77,))
    assert re.search(r"waits? for rank 77, which never calls it", str(got))
    assert operator.countOf(["never calls it" in str(one) for one in got.disagreements], True) == 1


# And at the size of a cluster: pytest -s -m slow -k cluster prints the time.
@pytest.mark.slow
def test_a_start_up_of_a_cluster():
    check_start_up(4096)
