"""Test derived groups, and groups shared between grids, in fake worlds."""

import pytest
import torch.distributed as dist
from group_checks import registered

from hypercomm import GridSet, HyperCommGrid
from hypercomm.errors import GroupOptionsError
from hypercomm.testing import fake_world


def ranks(group):
    return dist.get_process_group_ranks(group)


def ends(groups):
    return groups.pick(lambda group: (group[0], group[-1]))


# derive= makes groups from groups: the ends of each pipeline, halves, levels of a hierarchy, lists.
# The ranks of a list may be in several groups over the dims: 0 and 7 are in two pipelines.
# If ensure_pg gets another function for the same key, it raises.
@pytest.mark.parametrize(
    ("derive", "of_rank"),
    [
        (ends, {0: [0, 6], 7: [1, 7], 2: None}),
        (lambda groups: groups.chunks(2), {0: [0, 2], 7: [5, 7], 3: [1, 3]}),
        (lambda groups: groups.levels([2, 2])[1], {0: [0, 4], 7: [3, 7], 6: [2, 6]}),
        ([[7, 0], [1, 2, 5]], {0: [7, 0], 7: [7, 0], 2: [1, 2, 5], 3: None}),
        (lambda groups: [groups[1][:3], groups[0][:2]], {0: [0, 2], 3: [1, 3, 5], 4: None}),
    ],
)
def test_derived_groups(derive, of_rank):
    for rank, expected in of_rank.items():
        with fake_world(8, rank), HyperCommGrid([2, 4], ["tp", "pp"]) as grid:
            group = grid.create_pg("pp", name="made", derive=derive)
            assert (group and ranks(group)) == expected
            assert grid.get_pg("pp", name="made") is group
            assert grid.ensure_pg("pp", name="made", derive=derive) is group
            with pytest.raises(GroupOptionsError, match="derive"):
                grid.ensure_pg("pp", name="made", derive=lambda groups: groups.chunks(4))


# A grid uses a group of the grids before it in a set if the ranks are the same. The group is
# destroyed with the last grid that uses it. A destroyed grid no longer shares anything.
def test_last_grid_destroys_a_shared_group():
    with fake_world(8, rank=3):
        sizes = {"lender": "tp=2,dp=4", "grid": "tp=2,ep=2,dp=2"}
        lender, grid = GridSet(sizes, share="identical").values()
        tensor = lender.create_pg("tp")
        data = lender.create_pg("dp")
        assert grid.create_pg("tp") is tensor
        own = grid.create_pg("dp")
        assert ranks(own) == [3, 7]
        lender.destroy_pg("tp")
        assert tensor in registered()
        lender.destroy()
        assert {tensor, own} <= registered()
        assert data not in registered()
        assert grid.create_pg("ep+dp") not in {data, None}
        grid.destroy()
        assert len(registered()) == 1


# Derived groups are shared if the ranks are the same. With two stages, the ends of a pipeline are
# the whole pipeline.
def test_derived_groups_are_shared():
    with fake_world(4, rank=1), HyperCommGrid([2, 2], ["tp", "pp"], share="identical") as grid:
        pipeline = grid.create_pg("pp")
        assert grid.create_pg("pp", name="ends", derive=ends) is pipeline
        first = grid.create_pg("pp", name="first", derive=lambda groups: groups.chunks(1))
        assert ranks(first) == [1]
