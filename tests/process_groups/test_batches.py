"""Test several groups in one call, explain(), and splits of WORLD, in fake worlds."""

import collections
from datetime import timedelta

import bound_world
import numpy as np
import pytest
import torch.distributed as dist
from group_checks import registered

from hypercomm import GroupKey, HyperCommGrid
from hypercomm.errors import GroupMissingError
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.testing import fake_world

SIZES = {"tp": 2, "cp": 1, "dp": 4}


def grid_of(**options):
    return HyperCommGrid(list(SIZES.values()), list(SIZES), **options)


def ranks(group):
    return dist.get_process_group_ranks(group)


def third_fails(names):
    """Return a `new_group` that records its names and fails at the third call."""
    real_new_group = torchdist.new_group

    def failing(name, members, **options):
        names.append(name)
        if len(names) == 3:
            raise RuntimeError("out of sockets")
        return real_new_group(name, members, **options)

    return failing


@pytest.fixture
def bound(monkeypatch):
    """Make WORLD appear to be bound to a device, and record its splits."""
    calls = []
    bound_world.bind(monkeypatch)
    monkeypatch.setattr(dist, "split_group", lambda **options: calls.append(options["split_ranks"]))
    return calls


# create_pgs creates the same groups as single calls, in the given order, and returns them in order.
def test_create_pgs():
    with fake_world(8, rank=5), grid_of() as grid:
        dp, twin, both = grid.create_pgs(
            ["dp", {"dims": "dp", "name": "twin", "group_desc": "second"}, iter(["dp", "tp"])]
        )
        found = {str(key): ranks(group) for key, group in grid.pgs.items()}
        odd = [1, 3, 5, 7]
        assert [*found.items()] == [("dp", odd), ("dp (twin)", odd), ("tp+dp", list(range(8)))]
        assert [*grid.pgs.values()] == [dp, twin, both]
        assert dp.group_desc == "dp"
        assert twin.group_desc == "second"
        assert grid.get_pg("dp") is grid.ensure_pg("dp") is dp is not twin
        assert grid.create_pgs([]) == []


# An option of the call applies to every group that does not set this option. Groups can be shared.
def test_create_pgs_options_apply_to_all(monkeypatch):
    seen = []
    real_new_group = torchdist.new_group

    def recording(*args, **options):
        seen.append(options["timeout"])
        return real_new_group(*args, **options)

    monkeypatch.setattr(torchdist, "new_group", recording)
    with fake_world(8, rank=5), grid_of() as grid:
        dp, dp_cp, apart = grid.create_pgs(
            ["dp", {"dims": ["cp", "dp"]}, {"dims": "dp", "name": "apart", "share": "never"}],
            timeout=timedelta(seconds=9),
            share="identical",
        )
        assert dp is dp_cp is not apart
        tp = grid.create_pgs([{"dims": "tp", "timeout": timedelta(seconds=3)}], timeout=None)[0]
        assert ranks(tp) == [4, 5]
    assert seen == [timedelta(seconds=9)] * 2 + [timedelta(seconds=3)]


# If a group fails, the groups that this call has created are destroyed, and a retry succeeds.
def test_failed_create_pgs_is_rolled_back(monkeypatch):
    names = []
    with fake_world(8, rank=5), grid_of(share="identical") as grid:
        cp = grid.create_pg("cp", name="kept")
        monkeypatch.setattr(torchdist, "new_group", third_fails(names))
        before = registered()
        batch = ["tp", ["tp", "cp"], {"dims": "cp", "name": "again"}, "dp", ["tp", "dp"]]
        with pytest.raises(RuntimeError, match="out of sockets"):
            grid.create_pgs(batch)
        assert registered() == before
        assert dict(grid.pgs) == {GroupKey(("cp",), "kept"): cp}
        with pytest.raises(GroupMissingError):
            grid.get_pg("tp")
        groups = grid.create_pgs(batch)
        assert [group.size() for group in groups] == [2, 2, 1, 4, 8]
        assert groups[2] is cp
        assert len(set(names)) == len(names)  # no name is used twice


# explain() describes how a grid would create a group, or how it has created it.
def test_explain():
    with fake_world(8, rank=5), grid_of(share="identical") as grid:
        grid.create_pg("dp")
        before = registered()
        plan = grid.explain("tp")
        assert (plan.strategy, plan.backend, plan.served_by) == ("local", "fake", None)
        assert (len(plan.groups), plan.groups.group_size) == (4, 2)
        assert set(plan.alternatives) == {"split", "enumerate"}
        assert "WORLD is not bound to a device" in plan.alternatives["split"]
        assert grid.explain(["dp", "cp"]).served_by == "dp"
        assert "served by the group over dp" in str(grid.explain(["dp", "cp"]))
        assert registered() == before
        assert list(grid.pgs) == [GroupKey(("dp",))]
        assert grid.explain("tp").strategy == "local"  # explain() has created nothing
        assert grid.create_pg("tp").size() == 2
    with fake_world(8), grid_of(creation="enumerate") as grid:
        plan = grid.explain("dp")
        assert (plan.strategy, plan.reason) == ("enumerate", "asked for by name")
        assert plan.alternatives["local"].startswith("it would work too: each rank creates only")
    assert grid_of(world_size=8).explain("dp").reason == "torch.distributed is not initialised"


# If WORLD is bound to a device, each set of dims needs one split, for any size of the world.
def test_one_split_per_dims(bound):
    sizes = {"tp": 8, "cp": 4, "dp": 64, "pp": 8}
    with fake_world(16_384, rank=5000):
        grid = HyperCommGrid(list(sizes.values()), list(sizes))
        plan = grid.explain("tp")
        assert plan.strategy == "split"
        assert bound == []
        assert "one split by every rank" in plan.reason
        assert plan.alternatives["local"].startswith("it would work too: each rank creates only")
        for count, dims in enumerate([*sizes, ["dp", "cp"]], start=1):
            grid.create_pg(dims)
            assert len(bound) == count
    table = np.arange(16_384).reshape(list(sizes.values()), order="F")
    tp, cp, dp, pp = np.argwhere(table == 5000)[0]
    assert bound[0] == [table[:, cp, dp, pp].tolist()]
    assert bound[-1] == [sorted(table[tp, :, :, pp].ravel().tolist())]


# If torch computes the same split colour for several groups, they are split in several turns. This
# does occur: the cp groups (1478, 1486) and (1988, 1996) have the same colour. Groups of `derive=`
# may have several sizes.
def test_groups_with_equal_colors_split_in_turns(monkeypatch, bound):
    monkeypatch.setattr(dist.ProcessGroup, "split_group", None, raising=False)
    with fake_world(4096, rank=1988):
        grid = HyperCommGrid([8, 2, 32, 8], ["tp", "cp", "dp", "pp"], creation="split")
        plan = grid.explain("cp")
        grid.create_pg("cp")
        lists = [[1478, 1486], [1988, 1996], [1, 2, 3]]
        grid.create_pg(grid.dim_names, name="lists", derive=lists)
    assert plan.reason.endswith("in 2 turns, because torch gives some groups the same colour")
    assert bound == [[[0, 8]], [[1988, 1996]], [[1478, 1486]], [[1988, 1996]]]


# Groups of one colour are split in separate turns. Every rank makes the same number of calls. Each
# rank of the grid passes its group in one call. No call has two groups of the same colour.
@pytest.mark.parametrize("colors", [[1, 2, 1, 1], [5, 5, 5, 5], [3, 4, 4, 3]], ids=str)
def test_turns_separate_equal_colors(monkeypatch, bound, colors):
    monkeypatch.setattr(torchdist, "split_colors", lambda _groups: colors)
    own = {rank: [rank - rank % 2, rank - rank % 2 + 1] for rank in range(8)}
    calls = {}
    for rank in range(9):  # rank 8 is outside the grid, and still takes part in each split
        with fake_world(9, rank):
            grid = HyperCommGrid([2, 4], ["tp", "dp"], creation="split")
            grid.create_pg("tp")
            assert f"in {max(colors.count(color) for color in colors)} turns" in str(
                grid.explain("tp")
            )
        calls[rank] = [groups for (groups,) in bound]
        bound.clear()
    turns = max(colors.count(color) for color in colors)
    assert {len(made) for made in calls.values()} == {turns}
    created = collections.Counter()
    for turn in range(turns):
        taking_part = {rank for rank in range(9) if rank in calls[rank][turn]}
        groups = {tuple(calls[rank][turn]) for rank in taking_part}
        assert taking_part == {rank for group in groups for rank in group}
        used = [colors[group[0] // 2] for group in groups]
        assert len(used) == len(set(used))
        created.update(groups)
    assert created == {tuple(group): 1 for group in own.values()}
