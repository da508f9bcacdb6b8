"""Test every group of Megatron's grids against megatron-core's parallel_state."""

import functools

import megatron_comparison as comparison
import numpy as np
import pytest
from example_counts import examples
from hypothesis import assume, given, settings, strategies as st
from megatron_comparison import FIELDS, LONG, TheirCollection, megatrons_fields, theirs

from hypercomm import GridSet, HyperCommGrid, megatron_grids
from hypercomm.compat.megatron import collections_of
from hypercomm.compat.megatron.presets import create_megatron_pgs, megatron_requests
from hypercomm.errors import (
    ConfigurationError,
    GroupOptionsError,
    LayoutError,
)
from hypercomm.testing import fake_world


def ranks_of_fields(collection):
    return {name: comparison.plain(getattr(collection, name, None)) for name in FIELDS}


sizes = st.sampled_from([1, 2, 4])


@st.composite
def models(draw):
    """Draw a world, sizes and an order that Megatron accepts, often with pp last."""
    order = draw(st.permutations(["tp", "cp", "ep", "dp", "pp"]))
    if draw(st.booleans()):
        order = [dim for dim in order if dim != "pp"] + ["pp"]
    arguments = {dim: draw(sizes) for dim in ("tp", "cp", "pp", "ep")}
    arguments["expt_tp"] = draw(st.none() | sizes)
    arguments["order"] = "-".join(order)
    world_size = draw(st.sampled_from([1, 2, 4, 8, 12, 16, 24, 32]))
    return world_size, draw(st.integers(0, world_size - 1)), arguments


# Every field of the collection has the same ranks as Megatron's, for any sizes, order and rank.
@given(models())
@settings(max_examples=examples(150))
def test_collections_match_megatron(model):
    world_size, rank, arguments = model
    wanted = megatrons_fields(world_size, rank, **arguments)
    assume(wanted is not None)
    with fake_world(world_size, rank), megatron_grids(**arguments) as grids:
        assert ranks_of_fields(create_megatron_pgs(grids)["training"]) == wanted


# After a reshape to other sizes or another order, every field matches Megatron's at the new sizes.
@pytest.mark.full
@given(models(), models(), st.data())
@settings(max_examples=examples(100))
def test_reshaped_collections_match_megatron(before, after, data):
    world_size, rank, arguments = before
    others = after[2]
    others["order"] = data.draw(st.sampled_from([arguments["order"], others["order"]]))
    wanted = megatrons_fields(world_size, rank, **others)
    assume(wanted is not None)
    assume(megatrons_fields(world_size, rank, **arguments) is not None)
    target = megatron_grids(**others, world_size=world_size)["training"]
    with fake_world(world_size, rank), megatron_grids(**arguments) as grids:
        create_megatron_pgs(grids)
        expert = target.view("expert").layout
        grids["training"].reshape(str(target.layout), views={"expert": str(expert)})
        assert ranks_of_fields(collections_of(grids)["training"]) == wanted


OPTIONS = {
    "num_distributed_optimizer_instances": 2,
    "hierarchical_context_parallel_sizes": [2, 2],
    "create_all_gather_group": True,
    "get_embedding_ranks": lambda ranks: [ranks[0], ranks[1]],
    "get_position_embedding_ranks": lambda ranks: [ranks[-1]],
}


# Megatron's options change the groups as in Megatron, even after a reshape.
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rank", [0, 5, 14, 31])
@pytest.mark.parametrize(
    "order", ["tp-cp-ep-dp-pp", pytest.param("tp-cp-ep-pp-dp", marks=pytest.mark.full)]
)
def test_options_match_megatron(option, rank, order):
    options = {option: OPTIONS[option]}
    first = {"tp": 1, "cp": 4, "pp": 2, "ep": 4}
    then = {"tp": 2, "cp": 4, "pp": 2, "ep": 4}
    asked = functools.partial(megatrons_collection, 32, rank, options, order=order)
    wanted = [asked(**first), asked(**then)]
    with fake_world(32, rank), megatron_grids(**first, order=order) as grids:
        grid = grids["training"]
        found = [everything(create_megatron_pgs(grids, **options)["training"])]
        target = megatron_grids(**then, order=order)["training"]
        grid.reshape(str(target.layout), views={"expert": str(target.view("expert").layout)})
        found.append(everything(collections_of(grids)["training"]))
    assert found == wanted


EVERY = (*FIELDS, "hcp", "inter_dist_opt", "dp_cp_ag")
"""Includes groups that only some options create. Older Megatrons have no field for dp_cp_ag."""


def everything(collection):
    return {name: comparison.plain(getattr(collection, name, None)) for name in EVERY}


def megatrons_collection(world_size, rank, options, **sizes):
    """Return every field of Megatron's collection with some of its options."""
    named = {LONG[name]: value for name, value in sizes.items()}
    with fake_world(world_size, rank), comparison.gloo_made_fake(theirs):
        try:
            theirs.initialize_model_parallel(**named, **comparison.taken_by(theirs, options))
            collection = TheirCollection.use_mpu_process_groups()
            every = everything(collection)
            has_twin = options.get("create_all_gather_group", False)
            return every | {"dp_cp_ag": every["dp_cp"] if has_twin else None}
        finally:
            comparison.forget(theirs)


# Invalid options raise before anything is created, and the error names the option.
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_distributed_optimizer_instances": 3}, ConfigurationError),
        ({"timeout": 3}, GroupOptionsError),
        ({"backend": "bogus"}, GroupOptionsError),
        ({"tensor_parallel": 2}, TypeError),
    ],
)
def test_invalid_options(options, error):
    with fake_world(8), megatron_grids(tp=2, cp=2) as grids:
        with pytest.raises(error, match=[*options][-1].split("_")[0]):
            create_megatron_pgs(grids, **options)
        assert not grids["training"].pgs


# Expert dims may have Megatron's names, may be shared with the dense layers, and may be incomplete.
# The group of each field has the ranks that numpy computes. If the grid has none of the dims of a
# field, the group has one rank.
@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize(
    ("sizes", "names", "shared"),
    [
        ([2, 2, 1, 2], ["tp", "ep", "dp", "pp"], ["pp"]),
        ([2, 2, 1, 2], ["expt_tp", "ep", "expt_dp", "pp"], ["pp"]),
        ([2, 2, 2], ["tp", "ep", "pp"], ["tp", "pp"]),
        ([4, 2], ["ep", "pp"], ["pp"]),
        ([2, 2, 2], ["tp", "dp", "pp"], ["tp", "dp", "pp"]),
    ],
)
def test_names_of_expert_dims(rank, sizes, names, shared):
    with fake_world(8, rank), HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"]) as grid:
        grid.register_view("expert", sizes, names, shared)
        collection = create_megatron_pgs(GridSet({"m": grid}))["m"]
        ranks = np.arange(8).reshape(sizes, order="F")
        where = [int(at[0]) for at in np.nonzero(ranks == rank)]
        for field, dims in {
            "expt_tp": ("tp",),
            "ep": ("ep",),
            "tp_ep": ("tp", "ep"),
            "tp_ep_pp": ("tp", "ep", "pp"),
            "expt_dp": ("dp",),
            "intra_dist_opt": ("tp", "ep", "dp", "pp"),
        }.items():
            own = [name.removeprefix("expt_") in dims for name in names]
            group = ranks[
                tuple(slice(None) if of else at for of, at in zip(own, where, strict=True))
            ]
            assert comparison.plain(getattr(collection, field)) == tuple(
                sorted(group.ravel().tolist())
            )
        assert comparison.plain(collection.cp) == (rank,)


# A grid or a view that has none of Megatron's dims is rejected. The error shows the layout.
def test_grids_without_megatrons_dims():
    with (
        fake_world(8),
        HyperCommGrid([2, 2, 2], ["tensor", "data", "pipe"]) as grid,
        pytest.raises(LayoutError, match=r"tensor=2"),
    ):
        create_megatron_pgs(GridSet({"other": grid}))
    with fake_world(8), HyperCommGrid([8], ["tp"]) as grid:
        grid.register_view("expert", [8], ["experts"])
        with pytest.raises(LayoutError, match=r"expert.*experts=8"):
            megatron_requests(grid)
