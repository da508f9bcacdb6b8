"""The strategies for grids, views and mappings, `from_type`, and `given_ranks` on real ranks."""

import functools
import math
import pickle
import subprocess
import sys
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
    fake_world,
    given_ranks,
    grids,
    layouts,
    mappings,
    shardings,
    views_of,
)
from hypercomm.testing.kit import bodies, bound, running
from hypercomm.testing.kit.hook import register
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


@given_ranks(st.just(RankLayout([5], ["tp"])), ranks_max=4)
def many_ranks(layout):
    raise AssertionError(layout)


@given_ranks(st.sampled_from([RankLayout([2], ["tp"]), RankLayout([3], ["tp"])]))
def is_fine(layout):
    assert dist.get_world_size() == layout.size


@given_ranks(st.integers())
def no_layout(number):
    raise AssertionError(number)


# What does not exist, and bounds that nothing satisfies.
@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (
            lambda: smallest(layouts(dims_required=["tpp"])),
            errors.UnknownDimError,
            (
                "dims_required names 'tpp', which is not among ('tp', 'cp', 'ep', 'dp', 'pp'); did "
                "you mean 'tp'?"
            ),
        ),
        (
            lambda: smallest(layouts(dims_required=["tp", "dp"], max_dims=1)),
            InvalidArgument,
            (
                "no layout has dims_required=('tp', 'dp') and at most 1 dims, as max_dims, "
                "min_size=1 and max_ranks=512 want"
            ),
        ),
        (
            lambda: smallest(views_of(RankLayout([4], ["tp"]), shared_dims=["dp"])),
            errors.UnknownDimError,
            "shared_dims names 'dp', which is not among ('tp',)",
        ),
        (
            lambda: smallest(views_of("tp=4")),
            errors.LayoutError,
            "layout must be a RankLayout, got 'tp=4'",
        ),
        (
            lambda: smallest(
                views_of(
                    RankLayout([2, 2, 2], ["tp", "cp", "dp"]), dim_names=["a"], shared_dims=["cp"]
                )
            ),
            InvalidArgument,
            (
                "dim_names=('a',) are 1, and a view of tp=2,cp=2,dp=2 needs 2 names beside "
                "shared_dims=('cp',)"
            ),
        ),
        (
            lambda: smallest(mappings(along="batch")),
            errors.UnknownDimError,
            "along names 'batch', which is not among ('tp', 'cp', 'dp', 'pp')",
        ),
        (
            lambda: smallest(grids(views=2)),
            errors.LayoutError,
            "views must be True or False, got 2",
        ),
        (
            lambda: shardings([-1]),
            errors.LayoutError,
            "a length of shape must be 0 or more, got -1",
        ),
        (
            given_ranks,
            errors.LaunchError,
            "given_ranks needs a strategy, such as layouts(max_ranks=4, max_offset=0)",
        ),
        (
            lambda: given_ranks(st.integers(), layout=layouts()),
            errors.LaunchError,
            (
                "given_ranks takes strategies by position or by name, as hypothesis.given does, "
                "not both"
            ),
        ),
        (
            lambda: given_ranks(7),
            errors.LaunchError,
            ("given_ranks takes strategies, such as layouts(max_ranks=4, max_offset=0), got 7"),
        ),
        (
            lambda: given_ranks(st.integers())(lambda _: None),
            errors.LaunchError,
            (
                "what runs on ranks must be defined at the top of a module or in a class, got "
                "'<lambda>.<locals>.<lambda>'"
            ),
        ),
        (
            many_ranks,
            errors.LaunchError,
            (
                "an example of many_ranks has 5 ranks, more than 4; draw smaller ones, as in "
                "layouts(max_ranks=4, max_offset=0), or allow ranks_max=5"
            ),
        ),
        (
            no_layout,
            errors.LaunchError,
            (
                "nothing that is drawn for no_layout says how many ranks it needs: number; draw a "
                "layout, as from layouts(max_ranks=4, max_offset=0), or give ranks="
            ),
        ),
    ],
)
def test_sentence(call, kind, sentence):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == sentence


# hypothesis's entry point: layouts, grids and mappings are drawn by their types.
@pytest.mark.parametrize("kind", [RankLayout, HyperCommGrid, RankMapping])
def test_from_type(kind):
    register()
    assert isinstance(smallest(st.from_type(kind)), kind)


# Where all names of a view are the grid's, there is no view.
def test_grids_of_all_names_of_views():
    drawn = grids(views=True, dim_names=EXPERT_NAMES, min_dims=4, max_ranks=4)
    assert not smallest(drawn).views


# Who looks for a class's module without loading it finds its source; finders stay as they are.
def test_looking_loads_nothing():
    program = """
import sys
import hypercomm
from hypercomm.testing.kit.hook import register
register()
finders = list(sys.meta_path)
folder = f"{hypercomm.__path__[0]}/grid"
spec = finders[0].find_spec("hypercomm.grid.grid", [folder])
print("class HyperCommGrid" in spec.loader.get_source(spec.name), spec.name in sys.modules)
assert sys.meta_path == finders
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "True False\n", done.stderr


# It loads no layouts, and registers what is loaded afterwards.
def test_registered_when_loaded():
    program = """
import sys
from pathlib import Path
from hypothesis import find, strategies as st
from hypercomm.testing.kit.hook import register
register()
assert not {"hypercomm.layout", "numpy", "torch"} & set(sys.modules), sorted(sys.modules)
from hypercomm import RankLayout
print(find(st.from_type(RankLayout), lambda layout: layout.size > 1))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "tp=2\n", done.stderr


# Neither pytest's plugin nor hypothesis's hook loads any package but this, and little of it.
def test_the_plugin_is_light():
    program = """
import sys, pytest
before = set(sys.modules)
import hypercomm.testing.kit.plugin, hypercomm.testing.kit.hook
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(loaded - set(sys.stdlib_module_names)))
print(sorted(name for name in sys.modules if name.startswith("hypercomm.")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    packages, modules = done.stdout.splitlines()
    assert packages == "['hypercomm']", done.stdout + done.stderr
    kit = [f"hypercomm.testing{part}" for part in ("", ".kit", ".kit.hook", ".kit.plugin")]
    assert modules == str(["hypercomm.errors", *kit])


# A body has the grid that was drawn, live, and the same draw on each rank.
@pytest.mark.long
@given_ranks(grids(max_ranks=3, views=True), st.integers(0, 9), max_examples=4)
def test_on_ranks(grid, number):
    assert dist.get_world_size() == grid.layout.size
    total = torch.tensor([number])
    dist.all_reduce(total, group=grid[grid.dim_names].group)
    assert total.item() == number * math.prod(grid.shape)


@given_ranks(layouts(dim_names=["dp"], max_ranks=3, max_offset=0), max_examples=10)
def is_wrong(layout):
    assert layout.size < 2 or dist.get_rank() == 0


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
def test_a_grid_travels_with_its_arguments():
    given = {"backend": "gloo", "name": "b", "share": "identical", "creation": "enumerate"}
    grid = HyperCommGrid("tp=2", **given, world_size=2)
    form = pickle.loads(bodies.packed({"grid": grid}, "test")["grid"])
    with fake_world(2), form.build() as built:
        assert built.layout == grid.layout
        assert {name: getattr(built._state.options, name) for name in given} == given
    borrowing = HyperCommGrid("tp=2", share_with=grid, world_size=2)
    with pytest.raises(errors.LaunchError, match="it has share_with=, a grid which is not on the"):
        bodies.packed({"grid": borrowing}, "test")


# The smallest example is told, with the first failing rank's traceback.
@pytest.mark.long
def test_shrinks():
    with pytest.raises(RankFailedError, match=r"^rank 1 of 2 failed: Traceback") as caught:
        is_wrong()
    assert caught.value.rank == 1


# The option of pytest's is the bound where given_ranks has none: also above the machine's.
@pytest.mark.long
def test_the_option_is_the_bound(monkeypatch):
    monkeypatch.setattr(running, "most_ranks", lambda: 1)
    with pytest.raises(
        errors.LaunchError, match=r"^an example of is_fine has 2 ranks, more than 1;"
    ):
        is_fine()
    token = bound.current.set(bound.Bound(2))
    try:
        is_fine()
        assert (bound.current.get().ran, bound.current.get().left_out) == (1, [3])
    finally:
        bound.current.reset(token)


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
