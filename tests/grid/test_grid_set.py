"""Test sets of grids in fake worlds: placement, creation, and errors."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from group_checks import tables as registered
from hypothesis import given, strategies as st

from hypercomm import GridSet, HyperCommGrid, RankLayout
from hypercomm.compat.megatron import collections_of
from hypercomm.errors import (
    GridDestroyedError,
    GroupExistsError,
    GroupOptionsError,
    LayoutError,
    RankOutsideError,
    UnknownDimError,
    WorldSizeError,
)
from hypercomm.layout.placement import Placement, colocate, tile
from hypercomm.testing import fake_world, layouts

NAMES = ("a", "b", "c", "d")
DIMS = ("tp", "cp", "dp", "pp")


# ---- ranks without a grid -----------------------------------------------------------------------


# If a set of sizes leaves ranks of the world without a grid, the set warns, as a single grid does.
# A set of layouts does not warn, and neither does a set with `requires`.
@pytest.mark.parametrize("form", ["tp=2", {"tp": 2}], ids=str)
def test_warns_of_ranks_without_a_grid(form):
    with pytest.warns(UserWarning, match=r"no grid of the set holds ranks 4\.\.7 of a world of 8"):
        GridSet(a=form, b="dp=4", world_size=8)
    with pytest.warns(UserWarning, match=r"ranks 2\.\.7 .* requires='any'"):
        GridSet({"a": form}, world_size=8)
    placed = GridSet(a=form, b=RankLayout("dp=6", rank_offset=2), world_size=8)
    assert placed.placement.kind == "tiled"
    for quiet in (
        GridSet(a=form, requires="any", world_size=8),
        GridSet(a=form, requires="disjoint", world_size=8),
        GridSet(a=RankLayout("tp=2"), world_size=8),
        GridSet(a=form, b="dp=8", world_size=8),
    ):
        assert len(quiet["a"].layout.ranks) == 2


# ---- placement ----------------------------------------------------------------------------------


@st.composite
def shapes(draw):
    """Draw sizes by dim, in any order."""
    dims = draw(st.lists(st.sampled_from(DIMS), min_size=1, max_size=3, unique=True))
    return {dim: draw(st.integers(1, 4)) for dim in dims}


def as_text(sizes, unknown=None, mark="{}=-1"):
    return ",".join(
        mark.format(dim) if dim == unknown else f"{dim}={size}" for dim, size in sizes.items()
    )


# Tiled layouts have consecutive ranks, in the given order. One size in any layout may be
# unspecified. It is inferred from the ranks that the other layouts leave.
@given(st.lists(shapes(), min_size=1, max_size=4), st.data())
def test_tiled_layouts_are_consecutive(every, data):
    sizes = [math.prod(own.values()) for own in every]
    texts = [as_text(own) for own in every]
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(every) - 1))
        unknown = data.draw(st.sampled_from(list(every[place])))
        mark = data.draw(st.sampled_from(["{}=-1", "{}"]))
        texts[place] = as_text(every[place], unknown, mark)
    total = sum(sizes)
    placed = tile(dict(zip(NAMES, texts, strict=False)), total)
    starts = np.cumsum([0, *sizes[:-1]])
    for layout, own, start, size in zip(placed.values(), every, starts, sizes, strict=True):
        assert dict(zip(layout.dim_names, layout.shape, strict=True)) == own
        assert {*layout.ranks} == set(range(start, start + size))
    assert Placement(placed, total).kind == "tiled"


# Colocated layouts have the same ranks. An unspecified size is inferred from the other layout, or
# from the world if the other layout has an unspecified size, too.
@given(shapes(), shapes(), st.integers(0, 3), st.booleans())
def test_colocated_layouts_have_the_same_ranks(one, other, spare, is_closed):
    own = math.prod(one.values())
    their = math.prod(other.values())
    size = math.lcm(own, their)
    texts = {"a": as_text(one) + f",x={size // own}", "b": as_text(other) + ",x"}
    if not is_closed:
        texts["a"] = as_text(one) + ",x=-1"
        spare = 0
    placed = colocate(texts, size + spare)
    assert [{*layout.ranks} for layout in placed.values()] == [set(range(size))] * 2
    placement = Placement(placed, size + spare)
    assert placement.kind == "colocated"
    assert len(placement.spare_ranks) == spare


@st.composite
def lattices(draw):
    """Draw a layout, sometimes with gaps."""
    layout = draw(layouts(max_ranks=24, max_offset=12, max_size=3))
    if len(layout.dim_names) > 1 and draw(st.booleans()):
        layout = layout.select(**{layout.dim_names[0]: layout.shape[0] - 1})
    return layout


# A placement matches Python sets of the ranks, even for layouts with gaps.
@given(st.lists(lattices(), min_size=1, max_size=3), st.integers(0, 3))
def test_placement_matches_sets_of_ranks(chosen, spare):
    world_size = max(layout.last_rank for layout in chosen) + 1 + spare
    named = dict(zip(NAMES, chosen, strict=False))
    sets = {name: {*layout.ranks} for name, layout in named.items()}
    placement = Placement(named, world_size)
    pairs = {
        pair: sorted(sets[pair[0]] & sets[pair[1]]) for pair in itertools.combinations(named, 2)
    }
    shared = {pair: ranks for pair, ranks in pairs.items() if ranks}
    spare_ranks = sorted(set(range(world_size)) - set.union(*sets.values()))
    assert {pair: list(ranks) for pair, ranks in placement.overlaps.items()} == shared
    assert list(placement.spare_ranks) == spare_ranks
    is_same = all(ranks == sets["a"] for ranks in sets.values())
    if shared:
        kind = "colocated" if is_same else "overlapping"
    else:
        kind = "disjoint" if spare_ranks else "tiled"
    assert placement.kind == kind
    fitting = {"any"}
    if is_same:
        fitting.add("colocated")
    if not shared:
        fitting.add("disjoint")
    if kind == "tiled":
        fitting.add("tiled")
    for wanted in ("tiled", "disjoint", "colocated", "any"):
        if wanted in fitting:
            placement.require(wanted)
            continue
        with pytest.raises(WorldSizeError, match=f"requires='{wanted}'"):
            placement.require(wanted)


# ---- constructing sets --------------------------------------------------------------------------


# A set is a mapping of names to grids, in the order given. It is compared by identity.
def test_set_is_a_mapping():
    grids = GridSet.tile(8, encoder="tp=2,dp=2", llm="tp=4")
    assert list(grids) == ["encoder", "llm"]
    assert len(grids) == 2
    assert "llm" in grids
    assert "vision" not in grids
    assert grids.get("vision") is None
    assert [grid.name for grid in grids.values()] == ["encoder", "llm"]
    assert grids == grids  # noqa: PLR0124 - equal to itself
    assert grids != GridSet.tile(8, encoder="tp=2,dp=2", llm="tp=4")
    assert len({grids, grids}) == 1
    assert GridSet.tile(8, encoder="tp=2,dp=2", llm="tp")["llm"].size == 4


# Layouts with explicit ranks make a set, even if these ranks have gaps. Existing grids can join a
# set.
def test_explicit_layouts_and_existing_grids():
    whole = RankLayout("tp=2,pp=2,dp=2")
    with fake_world(8, 3):
        llm = HyperCommGrid([2, 2], ["tp", "dp"], 0, name="own")
        grids = GridSet({"llm": llm, "tail": whole.select(pp=1)})
        assert grids["llm"] is llm
        assert grids.placement.kind == "overlapping"
        assert GridSet.tile(8, a="tp=4", requires="disjoint")["a"].size == 4
        assert grids.placement.overlaps == {("llm", "tail"): (2, 3)}
        assert grids.placement.spare_ranks == (4, 5)
        assert grids.grids_of() == ("llm", "tail")
        with grids:
            grids.create_pgs({"llm": ["tp"], "tail": ["dp"]})
        assert llm.is_destroyed


# ---- process groups -----------------------------------------------------------------------------


def failing(_):
    raise ValueError("derived wrongly")


# If creation fails in a later grid, no group of an earlier grid is left, whether the error is found
# before or during the creation. The correct call works afterwards.
@pytest.mark.parametrize(
    ("requests", "error"),
    [
        ({"a": ["tp", "dp"], "b": ["xx"]}, UnknownDimError),
        ({"a": ["tp", "dp"], "c": ["dp"]}, UnknownDimError),
        ({"a": ["tp", "dp"], "b": ["tp", "tp"]}, GroupExistsError),
        ({"a": ["tp"], "b": ["tp", {"dims": "tp", "name": "x", "derive": failing}]}, ValueError),
        ({"a": ["tp"], "b": [{"dims": "tp", "timeout": 3}]}, GroupOptionsError),
        ({"a": ["tp"], "b": [{"dims": "tp", "junk": 3}]}, TypeError),
        ({"a": ["tp"], "b": 7}, LayoutError),
        ({7: ["tp"]}, UnknownDimError),
    ],
)
def test_failed_create_pgs_is_rolled_back(requests, error):
    with fake_world(4), GridSet.colocated(a="tp=2,dp=2", b="tp=4") as grids:
        kept = grids["a"].create_pg(["tp", "dp"])
        before = registered()
        with pytest.raises(error):
            grids.create_pgs(requests)
        assert registered() == before
        assert [list(grid.pgs.values()) for grid in grids.values()] == [[kept], []]
        grids.create_pgs({"a": ["tp", "dp"], "b": ["tp"]})
        assert [len(grid.pgs) for grid in grids.values()] == [3, 1]


# A grid of another world cannot join a set, and neither can a destroyed grid.
def test_grid_of_another_world_is_rejected():
    other = HyperCommGrid([4], ["tp"], world_size=4)
    with pytest.raises(WorldSizeError, match=r"'a' .* for a world of 4 ranks, .* this set has 8"):
        GridSet({"a": other}, world_size=8)
    assert GridSet({"a": other}, world_size=4)["a"] is other
    other.destroy()
    with pytest.raises(GridDestroyedError, match=r"grid \(tp=4\) was destroyed"):
        GridSet({"a": other}, world_size=4)


# destroy() and abort() destroy all groups that the grids created, and nothing else. They are
# idempotent.
@pytest.mark.parametrize("end", [GridSet.destroy, GridSet.abort])
def test_destroy_is_idempotent(end):
    with fake_world(8):
        foreign = dist.new_group([0, 1])
        before = registered()
        grids = GridSet.colocated(a="tp=2,dp", b="tp=4,dp")
        grids.create_pgs({"a": ["tp", "dp"], "b": ["tp"]})
        assert registered() != before
        end(grids)
        assert registered() == before
        assert all(grid.is_destroyed for grid in grids.values())
        end(grids)
        with pytest.raises(GridDestroyedError):
            grids.create_pgs({"a": ["tp"]})
        with pytest.raises(GridDestroyedError, match=r"grid 'a' .* no groups to collect"):
            collections_of(grids)
        with pytest.raises(GridDestroyedError), grids:
            pass
        dist.destroy_process_group(foreign)


# ---- transfers between grids --------------------------------------------------------------------


# transfer() moves a tensor between two grids of the set.
def test_transfer_between_grids():
    with fake_world(4), GridSet.colocated(train="tp=2,dp=2", infer="dp=4") as grids:
        rows = torch.tensor([[1, 2], [3, 4]])
        assert grids.transfer("train", "infer", rows).tolist() == [[1, 2]]
        assert grids.transfer("train", "train", rows, along=None).tolist() == rows.tolist()
        with pytest.raises(UnknownDimError, match="no grid 'x'"):
            grids.transfer("train", "x", rows)
        with pytest.raises(LayoutError, match="is not a multiple of 2"):
            grids.transfer("train", "infer", torch.zeros(3))


# grids_of() returns the names of the grids that contain a rank.
def test_grids_of():
    places = {"a": RankLayout("tp=2,dp=2", rank_offset=2), "b": RankLayout("tp=4", rank_offset=6)}
    grids = GridSet(places, world_size=12)
    found = [grids.grids_of(rank) for rank in range(12)]
    assert found == [(), ()] + [("a",)] * 4 + [("b",)] * 4 + [(), ()]
    for junk in ("0", True, 1.0):
        with pytest.raises(RankOutsideError):
            grids.grids_of(junk)


# A grid with two names in a set returns the groups of each name's requests.
def test_grid_with_two_names():
    with fake_world(8, rank=1), HyperCommGrid("tp=2,dp=4") as grid:
        grids = GridSet({"policy": grid, "reference": grid})
        created = grids.create_pgs({"policy": ["tp"], "reference": ["dp"]})
        assert created == {"policy": [grid["tp"].group], "reference": [grid["dp"].group]}
