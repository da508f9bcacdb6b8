"""Layouts from every form of sizes, texts that cannot be read, and dims in every spelling."""

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercomm import RankLayout
from hypercomm.errors import LayoutError, NotationError, UnknownDimError, WorldSizeError
from hypercomm.layout import read_layout
from hypercomm.layout.parsing import parse_groups
from hypercomm.layout.text import shown

pytestmark = pytest.mark.torch_free
LAYOUT = RankLayout([2, 3, 4], ["tp", "cp", "dp"])

# ---- one constructor rule -----------------------------------------------------------------------


# Every form of the same sizes is the same layout, whoever reads it.
@pytest.mark.parametrize("read", [RankLayout, read_layout])
def test_every_form(read):
    forms = [
        read("tp=2,cp=3,dp=4"),
        read({"tp": 2, "cp": 3, "dp": 4}),
        read([2, 3, 4], ["tp", "cp", "dp"]),
        read(np.array([2, 3, 4]), ("tp", "cp", "dp")),
        read(None, tp=2, cp=3, dp=4),
        read(LAYOUT),
    ]
    assert forms == [LAYOUT] * len(forms)
    assert RankLayout(tp=2, cp=3, dp=4) == LAYOUT
    assert read("tp=2,cp=3,dp", world_size=24) == LAYOUT
    assert read({"tp": 2, "cp": -1, "dp": 4}, world_size=24) == LAYOUT
    assert read("tp=2", rank_offset=np.int64(4)).ranks == range(4, 6)


# An unspecified size takes the ranks that are left of a world; a layout may leave some out.
def test_layouts_in_a_world(monkeypatch):
    assert read_layout("tp=2,dp", rank_offset=4, world_size=12).ranks == range(4, 12)
    assert read_layout("tp=2,dp=2", world_size=12).size == 4
    monkeypatch.setenv("HYPERCOMM_LAYOUT", "tp=2,dp=-1")
    assert read_layout(None, world_size=6).shape == (2, 3)
    monkeypatch.setenv("HYPERCOMM_LAYOUT", "tp:2")
    with pytest.raises(NotationError, match="HYPERCOMM_LAYOUT"):
        read_layout(None)
    monkeypatch.delenv("HYPERCOMM_LAYOUT")
    with pytest.raises(LayoutError, match="HYPERCOMM_LAYOUT"):
        read_layout(None)


# Sizes that do not fit are said in one sentence.
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: read_layout("tp=4,dp=4", world_size=8),
            "tp=4,dp=4 needs 16 ranks; the world has 8",
        ),
        (
            lambda: RankLayout("tp=4,dp=4", world_size=8),
            "tp=4,dp=4 needs 16 ranks; the world has 8",
        ),
        (
            lambda: read_layout("tp=3,dp=-1", world_size=8),
            "tp=3,dp=-1 needs a multiple of 3 ranks, as 6 and 9; the world has 8",
        ),
        (
            lambda: read_layout("tp=4,dp=-1", None, 5, 8),
            "tp=4,dp=-1 needs a multiple of 4 ranks, as 4; 3 are left from rank 5 on",
        ),
        (
            lambda: read_layout("tp=4", None, 6, 8),
            "tp=4 from rank 6 needs 10 ranks; the world has 8",
        ),
    ],
)
def test_sizes_that_do_not_fit(call, sentence):
    with pytest.raises(WorldSizeError) as caught:
        call()
    assert str(caught.value) == sentence


# Mistakes name the argument and the value.
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (RankLayout, LayoutError, "sizes are missing"),
        (lambda: RankLayout([2, 4]), LayoutError, "dim_names are missing"),
        (lambda: RankLayout([2], ["tp", "dp"]), LayoutError, "1 and 2"),
        (lambda: RankLayout([], []), LayoutError, "at least one dim"),
        (lambda: RankLayout("tp=2", ["tp"]), LayoutError, "leave dim_names out"),
        (lambda: RankLayout("tp=2", dp=2), LayoutError, "given twice"),
        (lambda: RankLayout(LAYOUT, ["tp"]), LayoutError, "alone"),
        (lambda: RankLayout({"tp": "2"}), LayoutError, "'tp' must be an int, got '2'"),
        (lambda: RankLayout(tp=True), LayoutError, "'tp' must be an int, got True"),
        (lambda: RankLayout(tp=0), LayoutError, "'tp' must be at least 1, got 0"),
        (lambda: RankLayout(tp=-1), NotationError, "'tp' is unspecified; .*world_size"),
        (lambda: RankLayout(tp=-1, dp=-1, world_size=4), NotationError, "tp.*dp.* unspecified"),
        (lambda: RankLayout([2, 2], ["tp", "tp"]), LayoutError, "'tp' comes twice"),
        (lambda: RankLayout(tp=2, rank_offset=-1), LayoutError, "rank_offset .*got -1"),
        (lambda: RankLayout(tp=2, strides=[0]), LayoutError, "strides .*at least 1, got 0"),
        (lambda: RankLayout(tp=2, dp=2, strides=[2]), LayoutError, "one stride for each"),
        (lambda: RankLayout(tp=2, dp=2, strides=[1, 1]), LayoutError, "'dp' .*at least 2, .*got 1"),
        (lambda: RankLayout(tp=2**20, dp=2**20), LayoutError, "2147483647"),
        (lambda: LAYOUT.rank(tp=1), LayoutError, "cp.*dp.* have none"),
        (lambda: LAYOUT.rank(tp=2, cp=0, dp=0), LayoutError, "'tp' must be in range.2., got 2"),
        (lambda: LAYOUT.rank(tp=0, cp=0, dp=0, xp=0), UnknownDimError, "'xp'"),
        (lambda: LAYOUT.shift(0, "xp", 1), UnknownDimError, "'xp'"),
        (lambda: LAYOUT.split("dp", a=3, b=2), LayoutError, "a=3,b=2 needs 6 ranks; .*'dp' has 4"),
        (lambda: LAYOUT.rank(tp=1, dq=2), UnknownDimError, "unknown dim 'dq'"),
        (lambda: LAYOUT.split("dp"), LayoutError, r"split\('dp', a=2, b=-1\)"),
        (lambda: LAYOUT.size_of(default=2), LayoutError, "dims is empty"),
        (lambda: LAYOUT.size_of(5, default=2), UnknownDimError, "unknown dim 5"),
        (lambda: LAYOUT.size_of("pp", "pp", default=2), LayoutError, "'pp' comes twice"),
        (lambda: LAYOUT.size_of("tp", default="x"), LayoutError, "default must be .* got 'x'"),
        (lambda: RankLayout.fit(7, tp=[2, 4], dp=[2]), WorldSizeError, r"'tp=2\|4,dp=2'"),
        (lambda: LAYOUT.merge(["tp", "dp"], "x"), LayoutError, "not neighbours"),
        (lambda: LAYOUT.rename(tp="dp"), LayoutError, "'dp' comes twice"),
        (lambda: LAYOUT.reorder("tp", "dp"), LayoutError, "every dim"),
        (lambda: LAYOUT.renumber([5], ["x"]), LayoutError, "x=5 has 5 ranks, .* has 24"),
        (lambda: RankLayout.from_json("[]"), LayoutError, "JSON form"),
        (
            lambda: RankLayout.from_json('{"shape": "tp=2", "dim_names": null}'),
            LayoutError,
            "lists 'shape' and 'dim_names'",
        ),
        (lambda: RankLayout.from_order("tp-tp", tp=2), NotationError, "'tp-tp'"),
        (lambda: RankLayout.from_order("tp", dp=2), LayoutError, "'dp' has size 2"),
    ],
)
def test_mistakes(call, error, words):
    with pytest.raises(error, match=words):
        call()


# ---- text ---------------------------------------------------------------------------------------


# A text in another notation is answered with the corrected one.
@pytest.mark.parametrize(
    "text",
    ["tp=2 dp=4", "tp=2;dp=4", "tp2,dp4", "tp2dp4", "tp:2,dp:4", "tp:2 dp:4", "tp 2, dp 4"],
)
def test_corrected_texts(text):
    with pytest.raises(NotationError, match=r"separate sizes with commas.*'tp=2,dp=4'"):
        RankLayout.parse(text, world_size=8)


# A part with a wrong size is named, and no other text is proposed.
@pytest.mark.parametrize(
    "part", ["tp=1e3", "tp=2xdp=4", "tp=-2", "tp=2.0", "tp=2=3", "tp=x", "tp=0", "tp=", "tp==2"]
)
@pytest.mark.parametrize("text", ["{}", "{},pp=2", "pp=2, {}"])
def test_sizes_that_cannot_be_read(text, part):
    with pytest.raises(NotationError) as caught:
        RankLayout.parse(text.format(part))
    right = f"the size in {part!r} must be a positive integer, or -1 to infer it"
    assert str(caught.value) == right


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the text is empty"),
        (" ", "the text is empty"),
        ("tp=2,,dp", "part 2 of 'tp=2,,dp' is empty"),
        ("tp=2,dp=4,", "part 3 of 'tp=2,dp=4,' is empty"),
        ("=2", "'=2' cannot be read"),
        ("tp+cp=2", "'tp[+]cp=2' cannot be read"),
        ("tp=2,dp:x", "'dp:x' in 'tp=2,dp:x' cannot be read"),
        ("tp=2,tp=2", "'tp' is given twice"),
        ("tp\x1b=2", r"'tp\\x1b' must be printable"),
        ("tp8", "did you mean 'tp=8'"),
        ("tp,dp", "only one size"),
        (8, "got 8"),
        (["tp=2"], "got"),
    ],
)
def test_texts_that_cannot_be_read(text, words):
    with pytest.raises(NotationError, match=words):
        RankLayout.parse(text)


# A text that makes no sense is answered quickly and shortly, however long it is.
@pytest.mark.parametrize("text", ["a" * 100_000, "a1" * 50_000, "a=" * 50_000, "tp=2 " * 20_000])
def test_long_texts(text):
    begin = time.perf_counter()
    with pytest.raises(NotationError) as caught:
        RankLayout.parse(text)
    assert time.perf_counter() - begin < 0.1
    assert len(str(caught.value)) < 500


# Values in messages are cut before they are written.
def test_values_are_shown_short():
    for value in ("a" * 10**7, [0] * 10**7, {"a" * 10**6: 1}, 10**5000, np.zeros(10**6)):
        assert len(shown(value)) < 500


# A dim name is printable, and cannot be read as several dims.
@pytest.mark.parametrize(
    "name", ["tp-cp", "tp+cp", "tp,cp", "tp cp", "tp=2", "tp\x1b[1m", "tp\0", "tp\u202e", "tp\n"]
)
def test_names_are_printable_and_never_ambiguous(name):
    with pytest.raises(LayoutError, match="must be printable"):
        RankLayout([2], [name])
    with pytest.raises(LayoutError, match="must be printable"):
        LAYOUT.rename(tp=name)


# ---- dims ---------------------------------------------------------------------------------------

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


# Every spelling means the same dims.
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
        ("tp,dp", NotationError, "'tp,dp' .*'tp[+]dp'"),
        ("tp+", NotationError, "'tp[+]' lacks a dim name"),
        ("TP", UnknownDimError, "did you mean 'tp'"),
        ("dpp", UnknownDimError, "did you mean 'dp'"),
        ("tp+tp", LayoutError, "'tp' comes twice"),
        ([], LayoutError, "dims is empty"),
        ([3], UnknownDimError, "unknown dim 3"),
        (3, LayoutError, "dims must be a sequence, got 3"),
    ],
)
def test_dims_that_are_wrong(dims, error, words):
    with pytest.raises(error, match=words):
        LAYOUT.order_dims(dims)


@pytest.mark.parametrize("text", ["", "tp,", "tp,tp", "tp+dp,dp+tp", "t p", 3])
def test_groups_that_cannot_be_read(text):
    with pytest.raises(NotationError):
        parse_groups(text)


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
        near = str(caught.value).partition("ranks; ")[2].partition(" ranks")[0]
        for number in near.split(" and "):
            assert RankLayout.fit(int(number), tp=tp, pp=pp, dp=-1).size == int(number)
