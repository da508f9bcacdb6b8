"""Test the calls that reach NCCL. A fake records the calls, because the tests run without a GPU.

torch's own functions create the groups. test_nccl.py tests NCCL itself, if there is a GPU.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fake_nccl import IS_PLUGIN, lone_world, part_of, recorded_nccl
from group_checks import restart_world, store_of_world

from hypercomm import HyperCommGrid, RankLayout, join_world
from hypercomm.errors import CreationError
from hypercomm.testing import fake_world, registered_groups

VERSION = torch.torch_version.TorchVersion(torch.__version__)
CUDA_5 = torch.device("cuda", 5)
HAS_SWITCH = VERSION >= "2.15"  # torch has an option to connect NCCL at the first message

needs_parts = pytest.mark.skipif(VERSION < "2.13", reason="torch 2.13 splits off parts of WORLD")


def what(calls):
    return [(call.what, call.ranks, call.splits) for call in calls]


def is_lazy(call):
    return bool(getattr(call.options, "lazy_init", False))


# ---- creation by the ranks of a group -----------------------------------------------------------


# If WORLD is bound to a device, the ranks of a grid at an offset create their groups alone. No rank
# splits WORLD, no other rank is needed, and WORLD stays bound. torch 2.15 and newer have an option
# of NCCL for this.
@pytest.mark.parametrize("creation", ["auto", "local"])
def test_offset_grid_on_a_bound_world(creation):
    with recorded_nccl() as calls, lone_world("nccl", 8, rank=5, device_id=CUDA_5):
        assert dist.group.WORLD.bound_device_id == CUDA_5
        calls.clear()
        with HyperCommGrid([2, 2], ["tp", "dp"], rank_offset=4, creation=creation) as grid:
            assert grid.explain("tp").strategy == "local"
            grid.create_pgs(["tp", "dp"])
            made = [call for call in calls if call.what == "create"]
            assert what(made) == [("create", (4, 5), False), ("create", (5, 7), False)]
            connects = set() if HAS_SWITCH else {"connect"}
            assert {call.what for call in calls} == {"create"} | connects
            assert [is_lazy(call) for call in made] == [HAS_SWITCH, HAS_SWITCH]
            assert {call.timeout for call in made} == {timedelta(minutes=10)}
        assert dist.group.WORLD.bound_device_id == CUDA_5


# A joined world has separate communicators, which are not split off a bound WORLD.
def test_joined_world_on_a_bound_world():
    who = {"parts": {"engine": 1}, "part": "engine", "rank": 0, "backend": "nccl"}
    with recorded_nccl() as calls, lone_world("nccl", 8, rank=5, device_id=CUDA_5):
        calls.clear()
        with (
            join_world(dist.HashStore(), name="weights", **who) as world,
            HyperCommGrid("tp=1", world=world) as grid,
        ):
            grid.create_pg("tp")
            made = [call for call in calls if call.what == "create"]
            assert what(made) == [("create", (0,), False)] * 2
            assert {call.name for call in made} == {
                world.pg.group_name,
                grid.get_pg("tp").group_name,
            }
        assert dist.group.WORLD.bound_device_id == CUDA_5


def sum_over(group):
    """Return the sum of 10**rank over the ranks of a group, or None if there is no group."""
    if group is None:
        return None
    number = torch.tensor([10.0 ** dist.get_rank()])
    part_of(group).allreduce([number]).wait()
    return int(number)


def begin_bound(backend):
    """Initialise WORLD again with each rank bound to a device."""
    device = torch.device("cuda", dist.get_rank())
    return restart_world(backend, device_id=device, timeout=timedelta(seconds=30))


# Two real ranks create their group. The other two ranks wait until the group exists.
@pytest.mark.full
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.ranks(4)
def test_creation_does_not_wait_for_other_ranks(backend):
    with recorded_nccl(communicates=True) as calls:
        rank = begin_bound(backend)
        store = store_of_world()
        grid = HyperCommGrid([2], ["tp"], rank_offset=2)
        if rank >= 2:
            assert sum_over(grid.create_pg("tp")) == 1100
            store.set(f"made on {rank}", "")
        store.wait(["made on 2", "made on 3"])
        assert sum_over(dist.group.WORLD) == 1111
        grid.destroy()
        made = {call.ranks for call in calls if call.what != "connect"} - {(0, 1, 2, 3)}
        assert made == ({(2, 3)} if rank >= 2 else set())
        assert not any(call.splits for call in calls)
        assert str(dist.group.WORLD.bound_device_id) == f"cuda:{rank}"
        dist.destroy_process_group()


# A creation that fails leaves WORLD bound.
def test_failed_creation_leaves_world_bound(monkeypatch):
    with recorded_nccl(), lone_world("nccl", 8, rank=5, device_id=CUDA_5):
        grid = HyperCommGrid([2, 2], ["tp", "dp"], rank_offset=4, lazy_init=False)
        with monkeypatch.context() as patch:

            def fails(*_):
                raise RuntimeError("out of memory on the GPU")

            for kind in ("Alone", "Connected"):
                patch.setattr(f"fake_nccl.{kind}.begin", fails)
            with pytest.raises(RuntimeError, match="out of memory on the GPU"):
                grid.create_pg("tp")
        assert dist.group.WORLD.bound_device_id == CUDA_5
        assert grid.create_pg("tp") is not None
        grid.destroy()


# ---- lazy and eager connections -----------------------------------------------------------------


# With lazy_init=True, NCCL connects at the first message, even if WORLD is bound.
@pytest.mark.parametrize("bound", [False, True])
def test_nccl_connects_lazily(bound):
    options = {"device_id": CUDA_5} if bound else {}
    with recorded_nccl() as calls, lone_world("nccl", 8, rank=5, **options):
        calls.clear()
        with HyperCommGrid([4, 2], ["tp", "pp"], lazy_init=True) as grid:
            grid.create_pg("pp")
            assert what(calls) == [("create", (1, 5), False)]
            assert is_lazy(calls[0]) == HAS_SWITCH
            if not HAS_SWITCH:
                with pytest.raises(CreationError, match="has no lazy_init=True for NCCL"):
                    grid.create_pg("tp", creation="enumerate")
            assert "a split connects all members" in str(grid.explain("tp"))


# With lazy_init=False, NCCL connects during the creation, even if WORLD is not bound.
@pytest.mark.parametrize("bound", [False, True])
def test_nccl_connects_eagerly(monkeypatch, bound):
    monkeypatch.setenv("LOCAL_RANK", "5")
    options = {"device_id": CUDA_5} if bound else {}
    with recorded_nccl() as calls, lone_world("nccl", 8, rank=5, **options):
        calls.clear()
        with HyperCommGrid([4, 2], ["tp", "pp"], creation="local", lazy_init=False) as grid:
            grid.create_pg("pp")
            assert [call.what for call in calls] == ["create", "connect"]
            assert calls[1].bound_to == CUDA_5
            assert not is_lazy(calls[0])


# The `pg_options` that the caller passes are used, and the object is not changed.
def test_pg_options_are_not_changed():
    with recorded_nccl() as calls, lone_world("nccl", 8, rank=5, device_id=CUDA_5):
        given = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        with HyperCommGrid([2, 2], ["tp", "dp"], rank_offset=4) as grid:
            grid.create_pg("tp", pg_options=given)
            made = next(call for call in calls if call.ranks == (4, 5) and call.what == "create")
            assert made.options.is_high_priority_stream
            assert is_lazy(made) == HAS_SWITCH
        assert not getattr(given, "lazy_init", False)


# The groups of one call can be created with different strategies. If the groups over a set of dims
# cover the world, one split creates all of them. "pp" is created lazily by its members only.
def test_strategy_per_key():
    with recorded_nccl() as calls, lone_world("nccl", 8, rank=5, device_id=CUDA_5):
        calls.clear()
        with HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"]) as grid:
            pp = {"dims": "pp", "creation": "local", "lazy_init": True}
            grid.create_pgs(["tp", "dp", pp])
            made = [call for call in calls if call.what in {"create", "split"}]
            assert what(made) == [
                ("split", (4, 5), True),
                ("split", (5, 7), True),
                ("create", (1, 5), False),
            ]
            assert [str(key) for key in grid.pgs] == ["tp", "dp", "pp"]
            with pytest.raises(CreationError, match="a split connects all members"):
                grid.create_pg("dp", name="lazy", creation="split", lazy_init=True)


# ---- splits -------------------------------------------------------------------------------------


# A WORLD of gloo and NCCL is split into groups with the requested backends, without enumeration,
# and real ranks communicate over both backends. Before torch 2.14, a split has wrong options for
# gloo, so the strategy "local" creates groups that have gloo.
@needs_parts
@pytest.mark.ranks(4)
def test_mixed_world():
    every = "cpu:gloo,cuda:nccl"
    with recorded_nccl(communicates=True):
        rank = begin_bound(every)
        own = [101, 1010][rank % 2]
        alone = 10**rank
        for_both = "split" if VERSION >= "2.14" else "local"
        with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
            for backend, strategy, on_nccl, on_gloo in (
                (None, for_both, own, own),
                ("nccl", "split", own, alone),
                ("cuda:nccl", "split", own, alone),
                ("gloo", "local", None, own),
                (every, for_both, own, own),
            ):
                name = f"of {backend}"
                assert grid.explain("dp", name=name, backend=backend).strategy == strategy
                group = grid.create_pg("dp", name=name, backend=backend)
                assert dist.get_backend(group) == (backend or every)
                assert (None if part_of(group) is None else sum_over(group)) == on_nccl
                number = torch.tensor([10.0**rank])
                if on_gloo != alone:
                    dist.all_reduce(number, group=group)
                assert int(number) == on_gloo
        dist.destroy_process_group()


# After a split that left out some ranks, torch before 2.14 adds counts to the names of later
# groups, and these counts differ between ranks. torch also ends groups in the order of their names,
# so NCCL hangs. The names that hypercomm uses have the same order on all members.
def test_names_after_a_partial_split():
    names, orders = {}, {}
    for rank in range(4):
        device = torch.device("cuda", rank)
        with recorded_nccl() as calls, lone_world("nccl", 4, rank=rank, device_id=device):
            partial = HyperCommGrid([3], ["tp"], creation="split")
            whole = HyperCommGrid([2, 2], ["tp", "dp"], creation="split")
            partial.create_pg("tp")
            whole.create_pgs(["dp", "tp"])
            for call in calls:
                if call.what == "split" and rank in call.ranks:
                    names.setdefault(call.ranks, set()).add(call.name)
            calls.clear()
            dist.destroy_process_group()
            orders[rank] = [call.ranks for call in calls if call.what == "shutdown"]
    assert names.keys() == {(0, 1, 2), (0, 1), (2, 3), (0, 2), (1, 3)}
    assert {len(given) for given in names.values()} == {1}
    by_name = sorted(names, key=lambda ranks: names[ranks].pop(), reverse=True)
    for rank, order in orders.items():
        mine = [ranks for ranks in by_name if rank in ranks]
        assert [ranks for ranks in order if ranks in by_name] == mine


# For a layout with a list of ranks, WORLD is split if a split keeps the order of the ranks (torch
# 2.15). Otherwise, the strategy "local" creates the groups.
def test_order_of_ranks_is_kept():
    listed = RankLayout([2, 2], ["tp", "dp"], ranks=[1, 0, 3, 2])
    with recorded_nccl() as calls, lone_world("nccl", 4, device_id=torch.device("cuda:0")):
        with HyperCommGrid(listed) as grid:
            group = grid.create_pg("tp")
            assert dist.get_process_group_ranks(group) == [1, 0]
            assert grid.explain("tp").strategy == ("split" if VERSION >= "2.15" else "local")
        assert (1, 0) in [call.ranks for call in calls]


# ---- abort --------------------------------------------------------------------------------------


# abort() passes all groups to NCCL before it ends the first group, as torch does for a whole job.
@pytest.mark.skipif(IS_PLUGIN, reason="torch 2.14 and newer do the same in C++")
def test_abort_ends_all_groups_together():
    with recorded_nccl() as calls, lone_world("nccl", 8, rank=5):
        grid = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"])
        grid.create_pgs(["tp", "dp"])
        calls.clear()
        grid.abort()
        assert [call.what for call in calls][:4] == ["group start", "abort", "abort", "group end"]
        assert {call.what for call in calls[4:]} == {"abort"}
        assert len(registered_groups()) == 1


# ---- without a GPU ------------------------------------------------------------------------------


# Without a GPU, a user can plan a cluster: fake worlds and explain() accept backend="nccl".
def test_nccl_on_a_laptop():
    with fake_world(8, rank=5), HyperCommGrid([4, 2], ["tp", "dp"], backend="nccl") as grid:
        assert grid.create_pg("dp").size() == 2
        assert grid.create_pg("tp", backend="cpu:gloo,cuda:nccl").size() == 4
    assert HyperCommGrid([4, 2], ["tp", "dp"], backend="nccl", world_size=8).backend == "nccl"
