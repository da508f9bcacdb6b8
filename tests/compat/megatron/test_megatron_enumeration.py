"""Test grids against megatron-core's HyperCommGrid."""

import functools
import os
from unittest import mock

from hypothesis import given, strategies as st
from megatron_oracle import hyper_comm_grid

from hypercomm import HyperCommGrid
from hypercomm.testing import dim_subsets, layouts

MEGATRON_NAMES = ("tp", "cp", "ep", "dp", "pp")
FREE_NAMES = ("tp", "etp", "tp_inner", "p", "x2", "DP")  # some names contain others


@st.composite
def twin_grids(draw):
    """Draw a shape, names and an offset. Make a grid of hypercomm and a grid of Megatron."""
    layout = draw(layouts(dim_names=draw(st.sampled_from([MEGATRON_NAMES, FREE_NAMES]))))
    spare = draw(st.integers(0, 3))
    world_size = layout.rank_offset + layout.size + spare
    arguments = list(layout.shape), list(layout.dim_names), layout.rank_offset
    with mock.patch.dict(os.environ, WORLD_SIZE=str(world_size)):
        theirs = hyper_comm_grid.HyperCommGrid(*arguments)
    return HyperCommGrid(*arguments, world_size=world_size), theirs


# get_rank_enum, _gen_rank_enum and _order_dims return exactly the same, for dims in any order and
# for one dim as a string.
@given(twin_grids(), st.data())
def test_enumerations_agree(grids, data):
    ours, theirs = grids
    dims = list(data.draw(dim_subsets(ours.layout)))
    assert ours._gen_rank_enum(dims) == theirs._gen_rank_enum(dims)
    order_dims = getattr(theirs, "_order_dims", None) or functools.partial(
        theirs._order_dims_for, theirs.dim_names
    )
    for given_dims in (dims, dims[0]):
        assert ours.get_rank_enum(given_dims) == theirs.get_rank_enum(given_dims)
        assert ours._order_dims(given_dims) == order_dims(given_dims)
