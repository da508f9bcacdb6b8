"""Stages of pipelined layouts, against numpy's reshape and megatron-core's BridgeCommunicator."""

import itertools
import os
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import bridge_communicator, hyper_comm_grid

from hypercomm import RankLayout
from hypercomm.errors import LayoutError, RankOutsideError
from hypercomm.layout import pipelines as stages
from hypercomm.testing import layouts

DIMS = st.sampled_from(["pp", "tp", "none"])


def numbered(layout):
    """The ranks of a layout as an array with one axis for each dim, from numpy alone."""
    return np.arange(layout.size).reshape(layout.shape, order="F") + layout.rank_offset


def stages_of(layout, dim):
    """The ranks of each stage, ascending."""
    ranks = numbered(layout)
    if dim not in layout.dim_names:
        return [sorted(ranks.ravel().tolist())]
    stacked = np.moveaxis(ranks, layout.dim_names.index(dim), 0)
    return [sorted(stage.ravel().tolist()) for stage in stacked]


# The first and the last stage hold the ranks of the first and the last slice of numpy's array; a
# dim that the layout lacks makes one stage of all ranks.
@given(layouts(), DIMS)
def test_first_and_last_stage(layout, dim):
    by_stage = stages_of(layout, dim)
    assert list(stages.first_stage(layout, dim)) == by_stage[0]
    assert list(stages.last_stage(layout, dim)) == by_stage[-1]


# Ranks may be listed: the stages are slices of the list.
@given(st.permutations(range(12)))
def test_listed_ranks(ranks):
    layout = RankLayout([2, 2, 3], ["tp", "dp", "pp"], ranks=ranks)
    assert set(stages.first_stage(layout)) == set(ranks[:4])
    assert set(stages.last_stage(layout)) == set(ranks[8:])
    assert stages.pipeline_stages([layout], ranks[5]) == (1,)


# The stages of a chain are those of its modules, one list behind the other.
@given(st.lists(layouts(max_ranks=32), min_size=1, max_size=4), DIMS)
def test_chains(chain, dim):
    every = [stage for layout in chain for stage in stages_of(layout, dim)]
    assert stages.pipeline_depth(chain, dim) == len(every)
    for rank in range(50):
        found = [place for place, stage in enumerate(every) if rank in stage]
        assert list(stages.pipeline_stages(chain, rank, dim)) == found


# A question about one rank does not look at the others: a layout of 2**30 ranks answers at once.
def test_one_rank_of_many():
    layout = RankLayout.parse("tp=8,dp=1048576,pp=128")
    last = layout.last_rank
    assert stages.pipeline_stages([layout, layout], last) == (127, 255)


@st.composite
def module_layouts(draw):
    """Draw a layout as Megatron's bridge takes it: tp, cp of size 1, dp and pp in any order."""
    names = draw(st.permutations(["tp", "cp", "dp", "pp"]))
    sizes = {name: 1 if name == "cp" else draw(st.integers(1, 4)) for name in names}
    return RankLayout([sizes[name] for name in names], names, draw(st.integers(0, 9)))


def bridge_of(layout):
    """Megatron's bridge, and its grid of a layout; without a constructor it needs no world."""
    with mock.patch.dict(os.environ, WORLD_SIZE=str(layout.last_rank + 1)):
        grid = hyper_comm_grid.HyperCommGrid(
            list(layout.shape), list(layout.dim_names), layout.rank_offset
        )
    bridge = object.__new__(bridge_communicator.BridgeCommunicator)
    bridge.current_rank = layout.rank_offset
    return bridge, grid


# Megatron's bridge finds the same ranks at the boundaries.
@given(module_layouts())
def test_megatrons_bridge(layout):
    bridge, grid = bridge_of(layout)
    last = bridge.get_boundary_pp_stage_ranks(grid, is_src=True)
    first = bridge.get_boundary_pp_stage_ranks(grid, is_src=False)
    assert sorted(itertools.chain(*last)) == list(stages.last_stage(layout))
    assert sorted(itertools.chain(*first)) == list(stages.first_stage(layout))


LAYOUT = RankLayout.parse("tp=2,pp=2")


# What is no layout, chain, groups, dim or rank is refused, and the message shows it.
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: stages.first_stage("tp=2"), LayoutError, "RankLayout, got 'tp=2'"),
        (lambda: stages.pipeline_depth([]), LayoutError, "empty; give that of one module"),
        (lambda: stages.pipeline_depth(LAYOUT), LayoutError, "must be a sequence"),
        (lambda: stages.pipeline_depth({LAYOUT}), LayoutError, "a set has no order"),
        (lambda: stages.pipeline_stages([LAYOUT, 3], 0), LayoutError, "got 3"),
        (lambda: stages.pipeline_stages([LAYOUT], 2.0), RankOutsideError, "got 2.0"),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()
