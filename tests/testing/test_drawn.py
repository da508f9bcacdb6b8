"""The strategies for grids, views and mappings, `from_type`, and `given_ranks` on real ranks."""

import functools
import math
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from hypercomm import HyperCommGrid, RankLayout, RankMapping, errors
from hypercomm.errors import RankFailedError
from hypercomm.testing import (
    given_ranks,
    grids,
    layouts,
    mappings,
    on_ranks,
    pytest_plugin,
    shardings,
    views_of,
)
from hypercomm.testing.strategies import EXPERT_NAMES


def smallest(strategy, condition=lambda _: True):
    return find(strategy, condition, settings=settings(max_examples=2000, database=None))


# Required dims are in every layout, and shrink like the others.
@given(st.data())
def test_dims_required(data):
    wanted = data.draw(st.lists(st.sampled_from(["tp", "cp", "dp"]), unique=True))
    layout = data.draw(layouts(dims_required=wanted, max_ranks=32))
    assert set(wanted) <= set(layout.dim_names)
    assert layout.size <= 32


def test_dims_required_shrink():
    assert smallest(layouts(dims_required=["dp"])) == RankLayout([1], ["dp"])
    assert smallest(layouts(dims_required=["dp", "tp"])) == RankLayout([1, 1], ["tp", "dp"])


# A view has the ranks of its layout, and the groups of the dims that are shared.
@given(layouts(max_dims=4, max_offset=3, listed=True, max_ranks=64), st.data())
def test_views_of(layout, data):
    shared = data.draw(st.lists(st.sampled_from(layout.dim_names), unique=True))
    view = data.draw(views_of(layout, dim_names=list("abcde"), shared_dims=shared))
    assert view.ranks == layout.ranks
    for dim in shared:
        assert list(view.groups(dim)) == list(layout.groups(dim))


def test_views_shrink():
    layout = RankLayout.parse("tp=2,cp=2,dp=3,pp=2")
    assert smallest(views_of(layout)) == RankLayout([24], ["ep"])
    assert smallest(views_of(layout, shared_dims=["pp"])) == RankLayout([12, 2], ["ep", "pp"])
    assert smallest(
        views_of(layout, shared_dims=["cp"]), lambda view: len(view.dim_names) == 4
    ) == RankLayout([2, 2, 2, 3], ["ep", "cp", "expt_tp", "expt_dp"])


# A grid fills its world; its view, if it has one, has its ranks.
@given(grids(views=True, dims_required=["tp"]))
def test_grids(grid):
    assert grid.layout.ranks == range(grid.layout.size)
    assert grid.layout.size <= 16
    assert "tp" in grid.dim_names
    for view in grid._state.views.values():
        assert view.layout.ranks == grid.layout.ranks


# Mappings are what RankMapping takes, of every kind.
@given(mappings())
def test_mappings(mapping):
    assert isinstance(mapping, RankMapping)
    received = sum(len(mapping.receives(rank)) for rank in set(mapping.target_ranks))
    assert received >= len(set(mapping.target_ranks))


@pytest.mark.parametrize("kind", ["equal", "fan-in", "fan-out"])
def test_mappings_reach(kind):
    found = smallest(mappings(beside=True), lambda mapping: mapping.kind == kind)
    sizes = {"equal": (1, 1), "fan-in": (2, 1), "fan-out": (1, 2)}[kind]
    assert (found.source.size, found.target.size) == sizes
    assert found.target.ranks[0] == found.source.size


# Shardings cut axes that are there, each dim once, and make mappings of weights.
@given(st.lists(st.integers(0, 3), max_size=4), st.data())
def test_shardings(shape, data):
    cut = data.draw(shardings(shape))
    assert set(cut) <= {"tp", "cp", "dp"}
    assert all(shape[axis] > 0 for axis in cut.values())


@given(mappings(along=None, beside=False))
def test_mappings_of_weights(mapping):
    assert mapping.along is None
    assert mapping.source.ranks[0] == mapping.target.ranks[0] == 0


# Arguments that cannot work: the error names the argument and the value.
@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: layouts(dims_required=["tpp"]), errors.UnknownDimError, "did you mean 'tp'?"),
        (lambda: layouts(dims_required=["tp", "dp"], max_dims=1), InvalidArgument, "max_dims=1"),
        (lambda: views_of(LAYOUT, shared_dims=["ep"]), errors.UnknownDimError, "'ep'"),
        (lambda: views_of("tp=4"), errors.LayoutError, "RankLayout, got 'tp=4'"),
        (
            lambda: views_of(LAYOUT, dim_names=["a"], shared_dims=["cp"]),
            InvalidArgument,
            "needs 2 or more",
        ),
        (lambda: mappings(along="batch"), errors.UnknownDimError, "along names 'batch'"),
        (lambda: grids(views=2), errors.LayoutError, "views must be True or False, got 2"),
        (lambda: shardings([-1]), errors.LayoutError, "shape must be 0 or more, got [-1]"),
    ],
)
def test_bad_arguments_of_strategies(call, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        smallest(call())


LAYOUT = RankLayout([2, 2, 2], ["tp", "cp", "dp"])


# So do those of given_ranks, before a rank starts.
@pytest.mark.parametrize(
    ("decorator", "words"),
    [
        (given_ranks(st.just(RankLayout([5], ["tp"])), ranks_max=4), "has 5 ranks, more than 4"),
        (given_ranks(st.integers()), "no argument of test_given_ranks_that_cannot_work"),
        (given_ranks(st.just(threading.Lock()), ranks=1), "argument 'drawn' of test_given_ranks"),
    ],
)
def test_given_ranks_that_cannot_work(decorator, words):
    @decorator
    def body(drawn):
        raise AssertionError(drawn)

    with pytest.raises(errors.LaunchError, match=re.escape(words)):
        body()


# Layouts, grids and mappings that are loaded are drawn by their types.
@pytest.mark.parametrize("kind", [RankLayout, HyperCommGrid, RankMapping])
def test_from_type(kind):
    assert isinstance(smallest(st.from_type(kind)), kind)


# Where all names of a view are the grid's, there is no view.
def test_grids_of_all_names_of_views():
    drawn = grids(views=True, dim_names=EXPERT_NAMES, min_dims=4, max_ranks=4)
    assert not smallest(drawn).views


# hypothesis's entry point registers what is loaded, and loads nothing; pytest's plugin is light.
def test_entry_points_are_light():
    program = """
import sys, pytest, hypothesis
before = set(sys.modules)
import hypercomm.testing, hypercomm.testing.pytest_plugin
hypercomm.testing._register_strategies()
loaded = {name for name in set(sys.modules) - before}
print(sorted({name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)))
print(sorted(name for name in sys.modules if name.startswith("hypercomm.")))
from hypercomm import RankLayout
hypercomm.testing._register_strategies()
print(hypothesis.find(hypothesis.strategies.from_type(RankLayout), lambda one: one.size > 1))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    packages, modules, drawn = done.stdout.splitlines()
    assert packages in ("['hypercomm']", "[]"), done.stdout + done.stderr
    assert modules == str(
        ["hypercomm.errors", "hypercomm.testing", "hypercomm.testing.pytest_plugin"]
    )
    assert drawn == "tp=2"


# A body has the grid that was drawn, live, and the same draw on each rank.
@pytest.mark.long
@given_ranks(grids(max_ranks=3, views=True), st.integers(0, 9), max_examples=4)
def test_on_ranks(grid, number):
    assert dist.get_world_size() == grid.layout.size
    total = torch.tensor([number])
    dist.all_reduce(total, group=grid[grid.dim_names].group)
    assert total.item() == number * math.prod(grid.shape)


def doubled(test):
    """A decorator of one's own, which must be there on ranks, too."""

    @functools.wraps(test)
    def twice(*args, number, **kwargs):
        assert number >= 0, "outside"
        return test(*args, number=2 * number, **kwargs)

    return twice


class TestMethods:
    word = "mine"

    # A method has an object on each rank, a static one none.
    @pytest.mark.long
    @given_ranks(layouts(dim_names=["dp"], max_ranks=2, max_offset=0), max_examples=2)
    def test_drawn(self, layout):
        assert self.word == "mine"
        assert layout.size == dist.get_world_size()

    @pytest.mark.long
    @staticmethod
    @pytest.mark.ranks(1)
    def test_static(ranks):
        assert ranks == dist.get_world_size()

    # hypothesis's tests keep their decorators on ranks.
    @pytest.mark.long
    @pytest.mark.ranks(1)
    @settings(deadline=None, max_examples=3, database=None)
    @given(number=st.integers(1, 9))
    @doubled
    def test_decorated(self, number):
        assert number % 2 == 0
        assert self.word == "mine"


# A grid has its arguments on ranks, too; one that borrows from another grid cannot travel.
@pytest.mark.long
def test_a_grid_travels_with_its_arguments():
    given = {"backend": "gloo", "name": "b", "share": "identical", "creation": "enumerate"}
    grid = HyperCommGrid("tp=2", **given, world_size=2)

    def body(travelled):
        assert travelled.layout == grid.layout
        assert {name: getattr(travelled._state.options, name) for name in given} == given
        assert travelled.create_pg("tp").size() == 2

    on_ranks.run_body(body, {"travelled": grid}, 2)
    borrowing = HyperCommGrid("tp=2", share_with=grid, world_size=2)
    with pytest.raises(errors.LaunchError, match="it has share_with=, a grid which is not on the"):
        on_ranks.run_body(body, {"travelled": borrowing}, 2)


# The body may be a closure; the smallest example has the first failing rank's traceback.
@pytest.mark.long
def test_shrinks():
    most = 2

    @given_ranks(layouts(dim_names=["dp"], max_ranks=3, max_offset=0), max_examples=10)
    def is_wrong(layout):
        assert layout.size < most or dist.get_rank() == 0

    with pytest.raises(RankFailedError, match=r"^rank 1 failed: Traceback") as caught:
        is_wrong()
    assert caught.value.rank == 1
    assert "shape=(2,)" in "".join(caught.value.__notes__)


# Without an option of pytest's, the machine bounds the ranks; the option outranks that.
@pytest.mark.long
def test_the_option_is_the_bound(monkeypatch):
    @given_ranks(st.sampled_from([RankLayout([2], ["tp"]), RankLayout([3], ["tp"])]))
    def is_fine(layout):
        assert dist.get_world_size() == layout.size

    monkeypatch.setattr("hypercomm.testing.on_ranks.most_ranks", lambda: 1)
    with pytest.raises(errors.LaunchError, match="is_fine has 2 ranks, more than 1;"):
        is_fine()
    monkeypatch.setattr(pytest_plugin.bound, "most", 2)
    is_fine()
    assert pytest_plugin.bound.left_out == 3


# The plugin's marker, in this very suite.
@pytest.mark.long
@pytest.mark.ranks(2)
def test_marked(ranks, tmp_path):
    assert dist.get_world_size() == ranks
    assert tmp_path.is_dir()


# A bug planted in a layer of one's own is found on real ranks, and shrunk, in seconds.
@pytest.mark.slow
@pytest.mark.alone
def test_a_planted_bug_is_found_in_seconds(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "sharded_layer.py"
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "grid=HyperCommGrid(tp=2): ranks 0..1 of a world of 2,\n    batch=1,\n" in done.stdout
    assert float(done.stdout.rpartition(": ")[2]) < 5
