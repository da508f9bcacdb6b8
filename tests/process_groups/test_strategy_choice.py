"""Test how creation="auto" chooses a strategy for groups with ranks in any order."""

import inspect

import bound_world
import pytest
import torch.distributed as dist

from hypercomm import HyperCommGrid, RankLayout
from hypercomm.errors import CreationError
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.testing import fake_world

LISTED = RankLayout([2, 2, 2], ["tp", "cp", "dp"], ranks=[7, 6, 2, 3, 0, 9, 5, 8])


def strategy(layout, creation="auto"):
    return HyperCommGrid(layout, creation=creation, cover="any").explain("tp").strategy


def old_new_group(**_ranks_and_options):
    """A `new_group` without `sort_ranks`, as in torch 2.10."""


# A strategy that cannot keep the order of the ranks raises, and the error names the strategies that
# keep the order. "auto" uses one of these strategies. If WORLD is bound to a device, only groups
# with ascending ranks are split off.
def test_strategy_choice(monkeypatch):
    with fake_world(10):
        assert strategy(LISTED) == "local"
        if "sort_ranks" in inspect.signature(dist.new_group).parameters:
            assert strategy(LISTED, "enumerate") == "enumerate"
        monkeypatch.setattr(dist, "new_group", old_new_group)
        assert strategy("tp=2,dp=4", "enumerate") == "enumerate"
        with pytest.raises(CreationError, match=r"creation='enumerate'.*\['auto', 'local'\]"):
            HyperCommGrid(LISTED, creation="enumerate").create_pg("tp")
    bound_world.bind(monkeypatch)
    monkeypatch.setattr(torchdist, "keeps_order", lambda: False)
    monkeypatch.setattr(torchdist, "why_not_members", lambda: "all ranks must come")
    with fake_world(10):
        assert strategy("tp=2") == "split"
        with pytest.raises(CreationError, match="split_group"):
            HyperCommGrid(LISTED, creation="split").create_pg("tp")
        with pytest.raises(CreationError, match="ranks ascend"):
            HyperCommGrid(LISTED).create_pg("tp")
