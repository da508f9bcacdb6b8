"""Test that the public strategies keep and reach their bounds, and that examples shrink."""

import hypothesis
import pytest
from hypothesis import given, settings, strategies as st
from processes import run_python

from hypercomm import RankLayout
from hypercomm.testing import (
    dim_subsets,
    grids,
    layouts,
    mappings,
    orders,
    ranks_of,
    shardings,
    views_of,
)

LAYOUT = RankLayout("tp=2,cp=3,dp=4", rank_offset=5)


def find(strategy, condition=lambda _: True):
    """Find the smallest example, without the database. Its keys depend on the condition's text."""
    return hypothesis.find(strategy, condition, settings=settings(max_examples=2000, database=None))


@st.composite
def bounds(draw):
    """Draw bounds that some layout satisfies."""
    min_dims = draw(st.integers(1, 4))
    min_size = draw(st.integers(1, 3))
    max_dims = draw(st.integers(min_dims, 5))
    names = draw(st.permutations("abcdefg"))[: draw(st.integers(max_dims, 7))]
    return {
        "min_dims": min_dims,
        "max_dims": max_dims,
        "min_size": min_size,
        "max_size": draw(st.integers(min_size, 5)),
        "max_ranks": draw(st.integers(min_size**min_dims, 200)),
        "max_offset": draw(st.integers(0, 5)),
        "dim_names": names,
        "dims_required": draw(st.lists(st.sampled_from(names), max_size=min_dims, unique=True)),
    }


# A drawn layout keeps all bounds.
@pytest.mark.torch_free
@given(bounds(), st.data())
def test_layouts_keep_their_bounds(given_bounds, data):
    layout = data.draw(layouts(**given_bounds))
    assert given_bounds["min_dims"] <= len(layout.dim_names) <= given_bounds["max_dims"]
    assert set(given_bounds["dims_required"]) <= set(layout.dim_names)
    assert set(layout.dim_names) <= set(given_bounds["dim_names"])
    assert given_bounds["min_size"] <= min(layout.shape)
    assert max(layout.shape) <= given_bounds["max_size"]
    assert layout.size <= given_bounds["max_ranks"]
    assert 0 <= layout.rank_offset <= given_bounds["max_offset"]


# Each bound is reached, so no bound is tighter than documented. Layouts shrink towards few dims,
# small sizes, the first names and offset 0.
@pytest.mark.full
@pytest.mark.torch_free
@pytest.mark.parametrize(
    ("asked", "condition", "smallest"),
    [
        ({}, lambda _: True, "tp=1"),
        ({}, lambda layout: layout.dim_names == ("pp", "tp"), "pp=1,tp=1"),
        ({}, lambda layout: layout.size > 4, "tp=2,cp=3"),
        ({"max_dims": 2}, lambda layout: layout.shape == (4, 4), "tp=4,cp=4"),
        ({"min_size": 2, "max_ranks": 16}, lambda one: len(one.shape) == 4, "tp=2,cp=2,ep=2,dp=2"),
        ({"max_dims": 1, "max_size": 9, "max_ranks": 7}, lambda one: one.size > 6, "tp=7"),
        ({"min_dims": 2, "min_size": 2}, lambda _: True, "tp=2,cp=2"),
        ({"dim_names": ["x", "y"]}, lambda _: True, "x=1"),
        ({"dims_required": ["dp", "tp"]}, lambda _: True, "tp=1,dp=1"),
    ],
)
def test_layouts_reach_their_bounds_and_shrink(asked, condition, smallest):
    assert find(layouts(**asked), condition) == RankLayout(smallest)
    assert find(layouts(**asked), lambda layout: layout.rank_offset == 16).rank_offset == 16


# Drawn subsets of dims, ranks and orders belong to the layout.
@pytest.mark.torch_free
@given(layouts(listed=True, max_ranks=64) | layouts(), st.data())
def test_dim_subsets_ranks_and_orders(layout, data):
    least = data.draw(st.integers(0, len(layout.dim_names)))
    most = data.draw(st.integers(least, len(layout.dim_names)))
    dims = data.draw(dim_subsets(layout, min_dims=least, max_dims=most))
    assert least <= len(dims) == len(set(dims)) <= most
    assert set(dims) <= set(layout.dim_names)
    assert data.draw(ranks_of(layout)) in layout.ranks
    order = data.draw(orders(layout.dim_names))
    assert sorted(order.split("-")) == sorted(layout.dim_names)
    assert eval(hypothesis.vendor.pretty.pretty(layout)) == layout  # printed layouts can be pasted


# A view has the same ranks as its layout, and the same groups over the shared dims.
@pytest.mark.torch_free
@given(layouts(max_dims=4, max_offset=3, listed=True, max_ranks=64), st.data())
def test_views_share_groups(layout, data):
    shared = data.draw(st.lists(st.sampled_from(layout.dim_names), unique=True))
    view = data.draw(views_of(layout, dim_names=list("abcde"), shared_dims=shared))
    assert view.ranks == layout.ranks
    for dim in shared:
        assert list(view.groups(dim)) == list(layout.groups(dim))


@pytest.mark.full
def test_views_shrink():
    layout = RankLayout("tp=2,cp=2,dp=3,pp=2")
    assert find(views_of(layout)) == RankLayout([24], ["ep"])
    assert find(views_of(layout, shared_dims=["pp"])) == RankLayout([12, 2], ["ep", "pp"])
    four = find(views_of(layout, shared_dims=["cp"]), lambda view: len(view.dim_names) == 4)
    assert four == RankLayout([2, 2, 2, 3], ["ep", "cp", "expt_tp", "expt_dp"])


# A drawn grid has all ranks of its world. If it has a view, the view has the same ranks.
@given(grids(views=True, dims_required=["tp"]))
def test_grids_fill_their_world(grid):
    assert grid.layout.ranks == range(grid.layout.size)
    assert grid.layout.size <= 16
    assert "tp" in grid.dim_names
    for name in grid.views:
        assert grid.view(name).layout.ranks == grid.layout.ranks


# Mappings are drawn with a batch dim, or for weights.
@given(mappings(), mappings(along=None, beside=False))
def test_mappings(mapping, weight):
    received = sum(len(mapping.receives(rank)) for rank in set(mapping.target_ranks))
    assert received >= len(set(mapping.target_ranks))
    assert weight.along is None
    assert weight.source.ranks[0] == weight.target.ranks[0] == 0


# Shardings split axes that exist.
@pytest.mark.torch_free
@given(st.lists(st.integers(0, 3), max_size=4), st.data())
def test_shardings(shape, data):
    cut = data.draw(shardings(shape))
    assert set(cut) <= {"tp", "cp", "dp"}
    assert all(shape[axis] > 0 for axis in cut.values())


# The pytest plugin imports little. The first strategy registers the types with hypothesis.
def test_plugin_imports_little():
    program = """
import sys, pytest, hypothesis
before = set(sys.modules)
import hypercomm.testing, hypercomm.testing.pytest_plugin
loaded = {name for name in set(sys.modules) - before}
print(sorted({name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)))
print(sorted(name for name in sys.modules if name.startswith("hypercomm.")))
from hypercomm import RankLayout
from hypercomm.testing import layouts
print(hypothesis.find(hypothesis.strategies.from_type(RankLayout), lambda one: one.size > 1))
"""
    done = run_python("-c", program)
    packages, modules, drawn = done.stdout.splitlines()
    assert packages in ("['hypercomm']", "[]"), done.stdout + done.stderr
    names = ("errors", "lazy", "testing", "testing.pytest_plugin", "version")
    own = [f"hypercomm.{name}" for name in names]
    assert modules == str(own)
    assert drawn == "tp=2"
