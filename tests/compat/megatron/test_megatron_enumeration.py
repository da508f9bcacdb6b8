"""Test grids and orders against megatron-core's HyperCommGrid and RankGenerator."""

import functools
import os
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from megatron_oracle import hyper_comm_grid, parallel_state

from hypercomm import HyperCommGrid, RankLayout
from hypercomm.testing import dim_subsets, layouts, orders

MEGATRON_NAMES = ("tp", "cp", "ep", "dp", "pp")
FREE_NAMES = ("tp", "etp", "tp_inner", "p", "x2", "DP")  # some names contain others

sizes = st.integers(1, 4)


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


@st.composite
def twin_orders(draw):
    """Draw an order and sizes, and make a layout of hypercomm and Megatron's generator.

    Names that are not in the order have size 1. Megatron's generator cannot have both ep and cp.
    """
    named = draw(st.lists(st.sampled_from(MEGATRON_NAMES), min_size=1, unique=True))
    by_name = dict.fromkeys(MEGATRON_NAMES, 1) | {name: draw(sizes) for name in named}
    by_name[draw(st.sampled_from(["ep", "cp"]))] = 1
    order = draw(orders(named))
    rank_offset = draw(st.integers(0, 9))
    flat = {name: by_name[name] for name in (*order.split("-"), *by_name)}
    ours = RankLayout(flat, rank_offset=rank_offset)
    return ours, parallel_state.RankGenerator(**by_name, order=order, rank_offset=rank_offset)


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


# The groups of a token such as "tp-dp-cp" are exactly the same lists for every order of dims:
# Megatron reads a token as a set of names, and both packages list groups and ranks in ascending
# order.
@given(twin_orders(), st.data())
def test_groups_of_an_order_agree_with_rank_generator(orders_, data):
    ours, theirs = orders_
    dims = data.draw(dim_subsets(ours))
    assert ours.groups(*dims).to_array().tolist() == theirs.get_ranks("-".join(dims))
    assert ours.size == theirs.world_size
