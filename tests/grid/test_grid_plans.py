"""Planned groups, groups made of groups, and groups shared between grids, in fake worlds."""

import re

import pytest
import torch.distributed as dist
from ranks.common import registered

from hypercomm import HyperCommGrid
from hypercomm.errors import (
    CreationError,
    GridDestroyedError,
    GroupExistsError,
    GroupMissingError,
    GroupOptionsError,
    RankOutsideError,
)
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.testing import fake_world


def ranks(group):
    return dist.get_process_group_ranks(group)


def ends(groups):
    return groups.pick(lambda group: (group[0], group[-1]))


# A plan creates nothing, answers size and rank, and creates one group however often it is asked.
def test_a_plan():
    with fake_world(12, rank=7), HyperCommGrid([2, 6], ["tp", "pp"]) as grid:
        before = registered()
        planned = grid.plan_pg("pp")
        assert registered() == before
        assert (planned.size(), planned.rank(), planned.has_member()) == (6, 3, True)
        assert dict(grid.pgs) == {}
        with pytest.raises(GroupMissingError, match="hasn't been created"):
            grid.get_pg("pp")
        group = planned.create()
        assert planned.create() is group is grid.get_pg("pp") is grid.ensure_pg("pp")
        assert ranks(group) == [1, 3, 5, 7, 9, 11]
        assert len(registered() - before) == 1
        assert repr(planned).startswith("<created group of <2 groups of 6: (0, 2, 4, 6, ..., 10)")


# A key is planned once, whoever creates it; ensure_pg creates what was planned.
def test_a_key_is_planned_once():
    with fake_world(4), HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        planned = grid.plan_pg("tp")
        for again in (grid.plan_pg, grid.create_pg):
            with pytest.raises(GroupExistsError):
                again("tp")
        assert grid.ensure_pg("tp") is planned.create()


# Everything is checked when a group is planned, and a plan that is refused leaves its key free.
def test_a_plan_is_checked():
    with fake_world(4), HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        for bad in ({"backend": "warp"}, {"timeout": 3}, {"share": "all"}, {"name": ""}):
            with pytest.raises(GroupOptionsError):
                grid.plan_pg("tp", **bad)
        assert grid.plan_pg("tp").create().size() == 2


# A creation that fails can be tried again: a plan stays, a create_pg is forgotten.
def test_a_failure_can_be_repeated(monkeypatch):
    def fail(*_args, **_options):
        raise CreationError("the network is down")

    with fake_world(4), HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        planned = grid.plan_pg("tp")
        before = registered()
        with monkeypatch.context() as patch:
            patch.setattr(c10d, "new_group", fail)
            for create in (planned.create, lambda: grid.create_pg("dp")):
                with pytest.raises(CreationError, match="the network is down"):
                    create()
        assert registered() == before
        assert dict(grid.pgs) == {}
        assert planned.create().size() == grid.create_pg("dp").size() == 2


# What was planned goes with the grid: it cannot be created any more.
def test_a_plan_of_a_destroyed_grid():
    with fake_world(4):
        grid = HyperCommGrid([2, 2], ["tp", "dp"])
        planned = grid.plan_pg("tp")
        grid.destroy()
        with pytest.raises(GridDestroyedError):
            planned.create()


# A rank outside has no place in a group, and None for it.
def test_a_plan_outside():
    with fake_world(6, rank=5), HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        planned = grid.plan_pg("tp")
        assert not planned.has_member()
        assert planned.create() is None
        with pytest.raises(RankOutsideError):
            planned.rank()


# Groups made of groups: the ends of each pipeline, halves, and the levels of a hierarchy.
@pytest.mark.parametrize(
    ("derive", "of_rank"),
    [
        (ends, {0: [0, 6], 7: [1, 7], 2: None}),
        (lambda groups: groups.chunks(2), {0: [0, 2], 7: [5, 7], 3: [1, 3]}),
        (lambda groups: groups.levels([2, 2])[1], {0: [0, 4], 7: [3, 7], 6: [2, 6]}),
    ],
)
def test_derived_groups(derive, of_rank):
    for rank, expected in of_rank.items():
        with fake_world(8, rank), HyperCommGrid([2, 4], ["tp", "pp"]) as grid:
            group = grid.create_pg("pp", name="made", derive=derive)
            assert (group and ranks(group)) == expected
            assert grid.get_pg("pp", name="made") is group
            assert grid.ensure_pg("pp", name="made", derive=derive) is group


# A derivation needs a name, is a function, and makes groups; ensure_pg refuses another one.
def test_bad_derivations():
    with fake_world(8), HyperCommGrid([2, 4], ["tp", "pp"]) as grid:
        for arguments, sentence in [
            ({"derive": ends}, "derive= makes other groups than those over 'pp'; file them under"),
            ({"derive": 3, "name": "x"}, "derive must be a function of RankGroups, got 3"),
            ({"derive": lambda _: [0, 1], "name": "x"}, "derive must return RankGroups, but it"),
        ]:
            with pytest.raises(GroupOptionsError, match=f"^{re.escape(sentence)}"):
                grid.create_pg("pp", **arguments)
        grid.ensure_pg("pp", name="half", derive=lambda groups: groups.chunks(2))
        with pytest.raises(GroupOptionsError, match="derive the same groups, or use another name"):
            grid.ensure_pg("pp", name="half", derive=lambda groups: groups.levels([2, 2])[1])


# With share_with, a grid takes the other's group where the ranks are the same, and leaves it alone
# when it is destroyed.
def test_grids_share():
    with fake_world(8, rank=3):
        dense = HyperCommGrid([2, 4], ["tp", "dp"], share="identical")
        expert = HyperCommGrid([2, 2, 2], ["tp", "ep", "dp"], share="identical", share_with=dense)
        tensor, data = dense.create_pg("tp"), dense.create_pg("dp")
        assert expert.create_pg("tp") is tensor
        assert expert.create_pg(["ep", "dp"]) is data
        own = expert.create_pg("dp")
        assert ranks(own) == [3, 7]
        expert.destroy()
        assert own not in registered()
        assert {tensor, data} <= registered()
        dense.destroy()
        assert not {tensor, data} & registered()


# The grid that has a shared group last destroys it, whichever that is; one that was destroyed
# serves nobody any more.
def test_the_last_grid_destroys():
    with fake_world(8, rank=3):
        lender = HyperCommGrid([2, 4], ["tp", "dp"], share="identical")
        tensor, data = lender.create_pg("tp"), lender.create_pg("dp")
        grid = HyperCommGrid([2, 4], ["a", "b"], share="identical", share_with=lender)
        assert grid.create_pg("a") is tensor
        waiting = grid.plan_pg("b")
        lender.destroy_pg("tp")
        assert tensor in registered()
        lender.destroy()
        assert tensor in registered()
        assert data not in registered()
        assert waiting.create() not in {data, None}
        assert waiting.create() in registered()
        grid.destroy()
        assert tensor not in registered()


# Groups made of groups are shared where the caller's ranks are the same: the two ends of two stages
# are the pipeline.
def test_derived_groups_are_shared():
    with fake_world(4, rank=1), HyperCommGrid([2, 2], ["tp", "pp"], share="identical") as grid:
        pipeline = grid.create_pg("pp")
        assert grid.create_pg("pp", name="ends", derive=ends) is pipeline
        first = grid.create_pg("pp", name="first", derive=lambda groups: groups.chunks(1))
        assert ranks(first) == [1]


# What cannot be shared with is named.
def test_bad_share_with():
    with pytest.raises(GroupOptionsError, match=r"^share_with must be a HyperCommGrid, got 3$"):
        HyperCommGrid([2], ["dp"], share_with=3, world_size=2)
