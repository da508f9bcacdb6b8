"""Test Megatron's hyper_comm_grid: keys of groups, and use with a mocked torch.distributed."""

from unittest import mock

import pytest
import torch.distributed as dist
from megatron_oracle import hyper_comm_grid as theirs

import hypercomm
from hypercomm.compat.megatron import hyper_comm_grid as ours
from hypercomm.errors import HyperCommError
from hypercomm.testing import fake_world

SHAPE, NAMES = [2, 2, 2], ["tp", "dp", "pp"]
VIEW = ("expert", [2, 2, 2], ["expt_tp", "ep", "pp"], ["pp"])
MODULES = {"ours": ours}
if hasattr(theirs.HyperCommGrid, "register_view"):
    MODULES["theirs"] = theirs


@pytest.fixture(params=MODULES, name="grid")
def grid_of_either(request, monkeypatch):
    """Return a grid with a view, from hypercomm or Megatron. Both grids must pass the tests."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    grid = MODULES[request.param].HyperCommGrid(SHAPE, NAMES)
    grid.register_view(*VIEW)
    return grid


@pytest.fixture(name="created")
def subgroups():
    """Mock torch's function that creates groups, as Megatron's tests do."""
    with mock.patch("torch.distributed.new_subgroups_by_enumeration") as function:
        function.side_effect = lambda *_, **__: (mock.MagicMock(spec=dist.ProcessGroup), None)
        yield function


# Without a default group, only the mocked function is called, with the caller's arguments.
def test_mocked_creation(grid, created):
    options = object()
    with mock.patch("torch.distributed.get_rank", side_effect=AssertionError("nobody to ask")):
        group = grid.create_pg(["pp", "tp"], pg_options=options, group_desc="mine")
        shared = grid.create_pg("pp", view="expert")
        own = grid.create_pg("ep", view="expert")
    calls = [(call.args, call.kwargs) for call in created.call_args_list]
    assert calls == [
        (
            ([[0, 1, 4, 5], [2, 3, 6, 7]],),
            {"backend": None, "pg_options": options, "group_desc": "mine"},
        ),
        (([[0, 4], [1, 5], [2, 6], [3, 7]],), {"backend": None}),
        (([[0, 2], [1, 3], [4, 6], [5, 7]],), {"backend": None}),
    ]
    assert grid._pgs == {"pp-tp": group, "pp": shared, ("expert", ("ep",)): own}
    assert grid.get_pg(["tp", "pp"]) is group
    assert grid.get_pg("pp") is grid.get_pg("pp", view="expert") is shared
    assert grid.get_pg("ep", view="expert") is own


# get_pg() finds groups that are assigned to `_pgs`. destroy() destroys each group of which this
# rank is a member, but only once.
def test_assigned_groups(grid):
    member, other = (mock.MagicMock(spec=dist.ProcessGroup) for _ in range(2))
    non_member = dist.GroupMember.NON_GROUP_MEMBER
    grid._pgs = {"tp": member, "dp": non_member, "pp": None, "dp-tp": member, "pp-tp": other}
    assert grid._pgs["tp"] is member
    assert grid.get_pg(["tp", "dp"]) is member
    with mock.patch("torch.distributed.destroy_process_group") as destroy:
        grid.destroy()
    assert [call.args for call in destroy.call_args_list] == [(member,), (other,)]
    assert grid._pgs == {}


# Programs for Megatron search error messages for these phrases. hypercomm's messages contain the
# same phrases.
@pytest.mark.usefixtures("created")
@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda grid: grid.get_pg("tp"), KeyError, "Process group for.*hasn't been created"),
        (
            lambda grid: [grid.create_pg("tp") for _ in range(2)],
            KeyError,
            "Process group.*has already been created",
        ),
        (lambda grid: grid.get_rank_enum("ep"), ValueError, "'ep' is not in view 'base'"),
        (lambda grid: grid.register_view("v", [2, 2], ["a", "b"]), ValueError, "grid size is 8"),
        (
            lambda grid: type(grid)([4, 4], ["a", "b"]),
            RuntimeError,
            r"Grid shape \[4, 4\] is over sized",
        ),
    ],
)
def test_error_messages_match_megatron(grid, call, kind, message):
    with pytest.raises(kind, match=message) as caught:
        call(grid)
    assert isinstance(caught.value, HyperCommError) == isinstance(grid, hypercomm.HyperCommGrid)


# In a job, the groups of the grid and its views are listed under Megatron's keys.
def test_keys_in_a_job():
    with fake_world(8, rank=3), ours.HyperCommGrid(SHAPE, NAMES) as grid:
        assert isinstance(grid, hypercomm.HyperCommGrid)
        grid.register_view(*VIEW)
        group = grid.create_pg(["tp", "dp"])
        own = grid.create_pg("ep", view="expert")
        shared = grid.create_pg("pp", view="expert")
        grid.create_pg("dp", name="second")
        keys = {"dp-tp": group, ("expert", ("ep",)): own, "pp": shared}
        assert dict(grid._pgs) == keys
        grid.destroy()
        assert not {group, own, shared} & set(dist.distributed_c10d._world.pg_map)


# Megatron's tests use these private names: a method that returns dims in reversed order, and a dict
# of views.
def test_private_names_match_megatron(grid):
    assert grid._order_dims_for(["a", "b", "c"], ["a", "c"]) == (["c", "a"], "c-a")
    assert grid._order_dims_for(["ab", "a"], "a") == (["a"], "a")
    view = grid._views["expert"]
    assert (view.name, view.shape, view.dim_names, view.shared_dims) == VIEW


# As in Megatron, the environment variable WORLD_SIZE, if it is a number, overrides the job's size.
def test_sources_of_the_world_size(monkeypatch):
    with fake_world(8):
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(RuntimeError, match=r"over sized.*the world has 2"):
            ours.HyperCommGrid([2, 4], ["tp", "dp"])
        assert ours.HyperCommGrid([2, 4], ["tp", "dp"], world_size=8).size == 8
        monkeypatch.setenv("WORLD_SIZE", "many")
        assert ours.HyperCommGrid([2, 4], ["tp", "dp"]).size == 8
    layout = hypercomm.RankLayout([2, 4], ["tp", "dp"])
    assert ours.HyperCommGrid(layout, world_size=8)._pgs == {}


# Errors about views contain the same phrases as Megatron's errors, because programs search the
# messages for these phrases.
@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([2, 2], ["ep", "dp"]), "the grid size is 8"),
        (([2, 2], ["ep", "dp"]), "but the grid size"),
        (([8, 0], ["ep", "dp"]), "shape must be positive ints"),
        (([-1, 8], ["ep", "dp"]), "shape must be positive ints"),
        (([4, 2], ["ep", "pp"], ["pp", "pp"]), "duplicate shared_dims"),
        (([4, 2], ["ep", "cp"], ["cp"]), "Shared dim 'cp' .* is not in the base view"),
        (([4, 2], ["ep", "dp"], ["pp"]), "Shared dim 'pp' .* is not in the view's dim_names"),
        (([4, 2], ["ep", "pp"], ["pp"]), None),
        (([2, 2, 2], ["ep", "ep", "dp"]), "duplicate dim_names"),
        (([2, 2, 2], ["ep", "dp"]), r"len\(shape\).* != len\(dim_names\)"),
        (([2, 4], ["tp", "dp"], ["tp"]), None),
        (([4, 2], ["tp", "pp"], ["tp"]), "different membership across views"),
    ],
)
def test_errors_of_views_match_megatron(module, arguments, message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    grid = module.HyperCommGrid(SHAPE, NAMES)
    if message is None:
        grid.register_view("other", *arguments)
    else:
        with pytest.raises(ValueError, match=message) as caught:
            grid.register_view("other", *arguments)
        assert module is theirs or isinstance(caught.value, HyperCommError)


# If this rank is not in a group, torch returns None or a marker. The function returns False for
# both values.
def test_is_process_group_member():
    with fake_world(4, 1):
        assert ours._is_process_group_member(dist.new_group([0, 1]))
        assert not ours._is_process_group_member(dist.new_group([2, 3]))
        assert not ours._is_process_group_member(None)
