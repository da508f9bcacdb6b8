"""Test the groups of a rank in fake worlds of any size, without communication."""

from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist
from group_checks import tables as registered
from processes import run_python

from hypercomm import GroupKey, HyperCommGrid
from hypercomm.errors import (
    CreationError,
    GridDestroyedError,
    GroupOptionsError,
    NotInitializedError,
    RankOutsideError,
    WorldSizeError,
)
from hypercomm.testing import fake_world


# create_pg, get_pg and ensure_pg use one group per key. Dims can be in any order, in any iterable.
def test_one_group_per_key():
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


# ensure_pg raises if its options differ from the options of the first call.
def test_ensure_pg_with_other_options_raises():
    with fake_world(8), HyperCommGrid([8], ["dp"]) as grid:
        group = grid.ensure_pg("dp", timeout=timedelta(seconds=5), group_desc="mine")
        assert grid.ensure_pg("dp", timeout=timedelta(seconds=5), group_desc="mine") is group
        for other in ({}, {"timeout": timedelta(seconds=6), "group_desc": "mine"}):
            with pytest.raises(GroupOptionsError, match="was created with GroupOptions"):
                grid.ensure_pg("dp", **other)


# On a rank outside the grid, a process group is None, and calls that need coordinates raise.
# `group` of a dim also raises, because it is never None.
def test_rank_outside_the_grid():
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


# An enumeration that fails in the middle destroys the groups that it has created.
@pytest.mark.parametrize(("error", "raised"), [(OSError, OSError), (RuntimeError, CreationError)])
def test_failed_enumeration_is_rolled_back(error, raised):
    with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"], creation="enumerate") as grid:
        before = registered()
        created = []
        real_new_group = dist.new_group

        def third_one_fails(*arguments, **options):
            if len(created) == 2:
                raise error("no more sockets")
            created.append(real_new_group(*arguments, **options))
            return created[-1]

        with (
            mock.patch.object(dist.distributed_c10d, "new_group", third_one_fails),
            pytest.raises(raised, match="no more sockets"),
        ):
            grid.create_pg("tp")
        assert created[0] not in registered()[0]
        assert registered() == before
        assert not grid.pgs


# A destroyed grid has no groups and creates none. destroy() is idempotent, even after WORLD was
# destroyed.
def test_destroy_is_idempotent():
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


# A live job has priority over the environment, and an explicit world size has priority over both.
def test_sources_of_the_world_size(monkeypatch):
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


# Before init_process_group(), creating a group raises, and the error names that call.
def test_creation_before_init_process_group():
    grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"], world_size=8)
    with pytest.raises(NotInitializedError, match=r"over tp cannot be created; call .*init_pro"):
        grid.create_pg("tp")
    assert len(grid.pgs) == 0
    assert str(grid.reshape("tp=4,dp=2")).endswith("created: none\n  destroyed: none")


# If destroying one group fails, the other groups are destroyed, and the error is raised afterwards.
def test_destroy_continues_after_an_error(monkeypatch):
    with fake_world(4):
        grid = HyperCommGrid([2, 2], ["tp", "dp"])
        failing = grid.create_pg("tp")
        others = [grid.create_pg("dp"), grid.create_pg(["tp", "dp"])]
        real_destroy = dist.destroy_process_group

        def fail_for_one(group=None):
            if group is failing:
                raise RuntimeError("not this one")
            real_destroy(group)

        with monkeypatch.context() as patch:
            patch.setattr(dist, "destroy_process_group", fail_for_one)
            with pytest.raises(RuntimeError, match="not this one"):
                grid.destroy()
        assert not registered()[0].intersection(others)


# A program without mistakes prints nothing, even with torch's warnings enabled.
@pytest.mark.full
def test_correct_program_prints_nothing():
    program = (
        "from hypercomm.testing import fake_world\n"
        "from hypercomm import HyperCommGrid\n"
        "with fake_world(8), HyperCommGrid([8], ['dp']) as grid: grid.create_pg('dp')\n"
    )
    done = run_python("-W", "default", "-c", program, TORCH_CPP_LOG_LEVEL="WARNING")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
