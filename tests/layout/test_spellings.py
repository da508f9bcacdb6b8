"""Layouts from texts, sections and the environment, and dims in every spelling."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercomm import RankLayout
from hypercomm.errors import LayoutError, NotationError, UnknownDimError, WorldSizeError

pytestmark = pytest.mark.torch_free
LAYOUT = RankLayout([2, 3, 4], ["tp", "cp", "dp"])

SPELLINGS = [
    ("dp", "cp"),
    (["dp", "cp"],),
    (("cp", "dp"),),
    ({"cp", "dp"},),
    ("cp+dp",),
    ("dp-cp",),
    (" dp + cp ",),
    (["dp+cp"],),
]


# Every spelling means the same dims, wherever a layout is asked for some.
@pytest.mark.parametrize("dims", SPELLINGS)
def test_every_spelling(dims):
    assert LAYOUT.order_dims(dims) == ("cp", "dp")
    assert LAYOUT.groups(*dims) == LAYOUT.groups("cp", "dp")
    assert LAYOUT.size_of(*dims) == 3 * 4


# Sizes multiply, and a dim that is not there has the default.
@pytest.mark.parametrize("count", [1, 2, 3])
def test_sizes_multiply(count):
    sizes = {"tp": 2, "cp": 3, "dp": 4, "pp": 5}
    for dims in itertools.permutations(sizes, count):
        right = math.prod(sizes[dim] for dim in dims)
        assert LAYOUT.size_of(*dims, default=5) == right
        if "pp" in dims:
            with pytest.raises(UnknownDimError, match="unknown dim 'pp'"):
                LAYOUT.size_of(*dims)
        else:
            assert LAYOUT.size_of("+".join(dims)) == right


@pytest.mark.parametrize(
    ("dims", "error", "words"),
    [
        ("tp,dp", NotationError, "'tp,dp' would be several sets of groups; one is written 'tp+dp'"),
        ("tp+", NotationError, "'tp+' lacks a dim name"),
        ("TP", UnknownDimError, "did you mean 'tp'"),
        ("dpp", UnknownDimError, "did you mean 'dp'"),
        ("tp+tp", LayoutError, "'tp' comes twice"),
        ([], LayoutError, "dims is empty"),
        ([3], UnknownDimError, "unknown dim 3"),
    ],
)
def test_spellings_that_mean_nothing(dims, error, words):
    with pytest.raises(error, match=words.replace("+", "[+]")):
        LAYOUT.order_dims(dims)


# A name that could be read as several dims is refused where it is given.
@pytest.mark.parametrize("name", ["tp-cp", "tp+cp", "tp,cp", "tp cp"])
def test_a_dim_name_is_never_ambiguous(name):
    with pytest.raises(LayoutError, match="which the text forms use"):
        RankLayout([2], [name])


# ---- sections and the environment ---------------------------------------------------------------


# A section's order does not matter where the dims are given, else it is the layout's.
def test_sections():
    section = {"dp": -1, "tp": 2}
    dims = ["tp", "cp", "dp"]
    assert RankLayout.from_mapping(section, dims, world_size=8).sizes == {"tp": 2, "cp": 1, "dp": 4}
    assert RankLayout.from_mapping(section, world_size=8) == RankLayout([4, 2], ["dp", "tp"])
    assert RankLayout.from_mapping({"tp": 2}, rank_offset=4).ranks == range(4, 6)


@pytest.mark.parametrize(
    ("section", "error", "words"),
    [
        ({"tpp": 2}, LayoutError, "the key 'tpp', which is none of dims .*; did you mean 'tp'"),
        ({"learning_rate": 2}, LayoutError, "the key 'learning_rate', which is none of"),
        ({"tp": "2"}, LayoutError, "the size of dim 'tp' must be an int, got '2'"),
        ({"tp": True}, LayoutError, "must be an int, got True"),
        ({"tp": -1, "dp": -1}, NotationError, "only one size can be inferred, but tp, dp"),
        ({"tp": 3}, WorldSizeError, "tp=3 .* = 3 ranks, but world_size is 8"),
        ("tp=2", LayoutError, "config must map dims to sizes, got 'tp=2'"),
    ],
)
def test_sections_that_are_wrong(section, error, words):
    with pytest.raises(error, match=words):
        RankLayout.from_mapping(section, ["tp", "dp"], world_size=8)


def test_the_environment(monkeypatch):
    monkeypatch.setenv("HYPERCOMM_LAYOUT", "tp=2,dp=-1")
    assert RankLayout.from_environment(world_size=6).shape == (2, 3)
    monkeypatch.setenv("HYPERCOMM_LAYOUT", "tp:2")
    with pytest.raises(NotationError, match="environment's HYPERCOMM_LAYOUT: "):
        RankLayout.from_environment()
    monkeypatch.delenv("HYPERCOMM_LAYOUT")
    with pytest.raises(NotationError, match="has no HYPERCOMM_LAYOUT; set it"):
        RankLayout.from_environment()


# ---- what fits ----------------------------------------------------------------------------------


# The layout that fits best is the best of all that fit; where none does, the numbers named would.
@given(
    st.integers(1, 60),
    st.sets(st.integers(1, 8), min_size=1),
    st.sets(st.integers(1, 4), min_size=1),
)
def test_fit(world_size, tp, pp):
    shapes = [(a, b) for a in tp for b in pp if world_size % (a * b) == 0]
    if shapes:
        first, second = max(shapes)
        shape = RankLayout.fit(world_size, tp=tp, pp=pp, dp=-1).shape
        assert shape == (first, second, world_size // first // second)
        second, first = max(pair[::-1] for pair in shapes)
        assert RankLayout.fit(world_size, prefer=["pp"], tp=tp, pp=pp, dp=-1).shape[:2] == (
            first,
            second,
        )
    else:
        with pytest.raises(WorldSizeError) as caught:
            RankLayout.fit(world_size, tp=tp, pp=pp, dp=-1)
        near = (
            str(caught.value)
            .partition(f"multiply to {world_size} ranks; ")[2]
            .partition(" ranks")[0]
        )
        for number in near.split(" and "):
            assert RankLayout.fit(int(number), tp=tp, pp=pp, dp=-1).size == int(number)
