"""Which way of creating groups is chosen, for groups of ranks in any order."""

import inspect

import bound_world
import pytest
import torch.distributed as dist

from hypercomm import RankLayout
from hypercomm.errors import CreationError
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.strategies import choose, obstacles
from hypercomm.process_groups.world import current
from hypercomm.testing import fake_world

LISTED = RankLayout([2, 2, 2], ["tp", "cp", "dp"], ranks=[7, 6, 2, 3, 0, 9, 5, 8])


def old_new_group(**_ranks_and_options):
    """A `new_group` without `sort_ranks`, as in torch 2.10."""


# What cannot keep the order of members is refused, with what can; "auto" takes that. Where WORLD is
# bound to a device, groups that ascend are split off, and others are not.
def test_choices(monkeypatch):
    unsorted, ascending = LISTED.groups("cp"), RankLayout.parse("tp=2,dp=4").groups("tp")
    with fake_world(10):
        assert choose(current(), "auto", None, unsorted).strategy == "local"
        if "sort_ranks" in inspect.signature(dist.new_group).parameters:
            assert choose(current(), "enumerate", None, unsorted).strategy == "enumerate"
        monkeypatch.setattr(dist, "new_group", old_new_group)
        assert choose(current(), "enumerate", None, ascending).strategy == "enumerate"
        with pytest.raises(CreationError, match=r"creation='enumerate'.*\['auto', 'local'\]"):
            choose(current(), "enumerate", None, unsorted)
    bound_world.bind(monkeypatch)
    monkeypatch.setattr(c10d, "keeps_order", lambda: False)
    monkeypatch.setattr(c10d, "why_not_members", lambda: "all ranks must come")
    with fake_world(10):
        assert (
            choose(current(), "auto", "fake", RankLayout.parse("tp=2").groups("tp")).strategy
            == "split"
        )
        with pytest.raises(CreationError, match="split_group"):
            choose(current(), "split", "fake", unsorted)
        assert "split_group" in obstacles(current(), "fake", unsorted, None)["split"]
        with pytest.raises(CreationError, match="ranks ascend"):
            choose(current(), "auto", "fake", unsorted)
