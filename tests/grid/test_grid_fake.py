"""The grid in fake worlds: which groups a rank is in, in worlds of any size. No communication."""

from datetime import timedelta
from itertools import chain, combinations
from unittest import mock

import pytest
import torch.distributed as dist
from by_numpy import group_of
from effort import examples
from group_facts import tables as registered
from hypothesis import given, settings
from hypothesis import strategies as st
from launched import run_python

from hypercomm import GroupKey, HyperCommGrid
from hypercomm.errors import (
    CreationError,
    GridDestroyedError,
    GroupOptionsError,
    NotInitializedError,
    RankOutsideError,
    WorldSizeError,
)
from hypercomm.testing import dim_subsets, fake_world, layouts, ranks_of


def numpy_group(layout, dims, rank):
    """The members of a rank's group, by numpy alone."""
    return sorted(group_of(layout.shape, layout.dim_names, layout.rank_offset, dims, rank))


# torch registers for a rank exactly the members that numpy finds, for any layout, dims and rank.
@settings(max_examples=examples(200))
@given(st.data())
def test_membership(data):
    layout = data.draw(layouts())
    dims, rank = data.draw(dim_subsets(layout)), data.draw(ranks_of(layout))
    spare = data.draw(st.integers(0, 3))
    world_size = layout.rank_offset + layout.size + spare
    with fake_world(world_size, rank), HyperCommGrid(layout) as grid:
        group = grid.create_pg(dims)
        assert dist.get_process_group_ranks(group) == numpy_group(layout, dims, rank)
        assert list(grid.group_ranks(dims)) == numpy_group(layout, dims, rank)
        assert dist.get_rank(group) == numpy_group(layout, dims, rank).index(rank)


# create, get and ensure: one group per key, in any order of dims and as any iterable of names.
def test_keys():
    with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
        group = grid.create_pg(("dp", "cp"))
        assert grid.get_pg(["cp", "dp"]) is group
        assert grid.get_pg(dim for dim in ("dp", "cp")) is group
        assert grid.ensure_pg(["dp", "cp"]) is group
        twin = grid.ensure_pg(["dp", "cp"], name="twin")
        assert twin is not group
        assert grid.get_pg(["dp", "cp"], name="twin") is twin
        assert dict(grid.pgs) == {
            GroupKey(("cp", "dp")): group,
            GroupKey(("cp", "dp"), "twin"): twin,
        }
        with pytest.raises(TypeError):
            grid.pgs[GroupKey(("tp",))] = group


# ensure_pg refuses other options than the first call's, whichever way they differ.
def test_ensure_keeps_to_the_first_options():
    with fake_world(8), HyperCommGrid([8], ["dp"]) as grid:
        group = grid.ensure_pg("dp", timeout=timedelta(seconds=5), group_desc="mine")
        assert grid.ensure_pg("dp", timeout=timedelta(seconds=5), group_desc="mine") is group
        for other in ({}, {"timeout": timedelta(seconds=6), "group_desc": "mine"}):
            with pytest.raises(GroupOptionsError, match="was created with GroupOptions"):
                grid.ensure_pg("dp", **other)


# On a rank outside the grid a group is None, and asking where the rank is, is an error; so is a
# group of its dims, which is never None.
def test_rank_outside():
    with fake_world(8, rank=7), HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        assert not grid.is_current_rank_in_grid()
        assert grid.create_pg("dp") is None
        assert grid.get_pg("dp") is None
        with pytest.raises(RankOutsideError, match=r"rank 7 is not in layout tp=2,dp=2, .* 0\.\.3"):
            grid.coords()
        for ask in (
            lambda: grid.group_ranks("dp"),
            lambda: grid["tp"].rank,
            lambda: grid["tp"].group,
            grid["tp"].barrier,
        ):
            with pytest.raises(RankOutsideError, match="rank 7 is not in layout"):
                ask()
        assert grid["tp"].size == 2
        assert [7 in grid, 3 in grid, "tp" in grid, "pp" in grid] == [False, True, True, False]


# An enumeration that fails in the middle takes back the groups that it had created.
@pytest.mark.parametrize(("error", "raised"), [(OSError, OSError), (RuntimeError, CreationError)])
def test_enumeration_is_rolled_back(error, raised):
    with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"], creation="enumerate") as grid:
        before, created = registered(), []
        honest = dist.new_group

        def third_one_fails(*arguments, **options):
            if len(created) == 2:
                raise error("no more sockets")
            created.append(honest(*arguments, **options))
            return created[-1]

        with (
            mock.patch.object(dist.distributed_c10d, "new_group", third_one_fails),
            pytest.raises(raised, match="no more sockets"),
        ):
            grid.create_pg("tp")
        assert created[0] not in registered()[0]
        assert registered() == before
        assert not grid.pgs


# A destroyed grid has no groups and makes none; destroying twice is harmless, also after WORLD.
def test_destroy():
    with fake_world(8):
        before = registered()
        grid = HyperCommGrid([2, 4], ["tp", "dp"])
        grid.create_pg("dp")
        grid.destroy()
        grid.destroy()
        assert registered() == before
        for call in (grid.create_pg, grid.get_pg, grid.ensure_pg):
            with pytest.raises(GridDestroyedError, match=r"\(tp=2,dp=4\) was destroyed"):
                call("dp")
        with pytest.raises(GridDestroyedError):
            grid.__enter__()
        assert grid.get_rank_enum("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with fake_world(8):
        late = HyperCommGrid([8], ["dp"])
        late.create_pg("dp")
    late.destroy()


# The live job outranks the environment, and an explicit world size outranks both.
def test_where_the_world_size_comes_from(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert HyperCommGrid([4], ["dp"]).coords() == {"dp": 3}
    with pytest.raises(WorldSizeError):
        HyperCommGrid([8], ["dp"])
    assert HyperCommGrid([8], ["dp"], world_size=8).size == 8
    with fake_world(8, rank=5):
        assert HyperCommGrid([8], ["dp"]).coords() == {"dp": 5}
        too_large = HyperCommGrid([16], ["dp"], world_size=16)
        with pytest.raises(WorldSizeError, match=r"needs 16 ranks; the world has 8"):
            too_large.create_pg("dp")
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(WorldSizeError, match=r"WORLD_SIZE must be an integer .* got 'many'"):
        HyperCommGrid([8], ["dp"])
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(NotInitializedError, match="init_process_group"):
        HyperCommGrid([8], ["dp"])


# Before torch.distributed is initialised, a creation fails and says how to initialise it.
def test_creation_before_torch_is_initialised():
    grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"], world_size=8)
    with pytest.raises(NotInitializedError, match=r"over tp cannot be created; call .*init_pro"):
        grid.create_pg("tp")
    assert len(grid.pgs) == 0
    assert str(grid.reshape("tp=4,dp=2")).endswith("created: none\n  destroyed: none")


# A group over other members of the world than the plan's cannot be shared; one with equal members
# can, and the order of creation does not matter.
def test_sharing_compares_members():
    with (
        fake_world(8, rank=3),
        HyperCommGrid([2, 1, 4], ["tp", "cp", "dp"], share="identical") as grid,
    ):
        every_dims = list(
            chain.from_iterable(combinations(grid.dim_names, count) for count in (1, 2, 3))
        )
        groups = {dims: grid.create_pg(dims) for dims in every_dims}
        for one, other in combinations(every_dims, 2):
            same = numpy_group(grid.layout, one, 3) == numpy_group(grid.layout, other, 3)
            assert (groups[one] is groups[other]) == same
        longer = grid.create_pg("tp", name="longer", timeout=timedelta(seconds=3))
        assert longer is not groups["tp",]


# When one group cannot be destroyed, the others are, and the error is raised at the end.
def test_destroy_goes_on(monkeypatch):
    with fake_world(4):
        grid = HyperCommGrid([2, 2], ["tp", "dp"])
        stubborn = grid.create_pg("tp")
        others = [grid.create_pg("dp"), grid.create_pg(["tp", "dp"])]
        honest = dist.destroy_process_group

        def refuse_one(group=None):
            if group is stubborn:
                raise RuntimeError("not this one")
            honest(group)

        with monkeypatch.context() as patch:
            patch.setattr(dist, "destroy_process_group", refuse_one)
            with pytest.raises(RuntimeError, match="not this one"):
                grid.destroy()
        assert not registered()[0].intersection(others)


# torch's own messages do not reach a user who made no mistake.
@pytest.mark.full
def test_a_plain_run_is_silent():
    program = (
        "from hypercomm.testing import fake_world\n"
        "from hypercomm import HyperCommGrid\n"
        "with fake_world(8), HyperCommGrid([8], ['dp']) as grid: grid.create_pg('dp')\n"
    )
    done = run_python("-W", "default", "-c", program, TORCH_CPP_LOG_LEVEL="WARNING")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
