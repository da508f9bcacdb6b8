"""Test every form of sizes, text that cannot be parsed, and every way to name dims."""

import itertools
import math
import re
import time

import numpy as np
import pytest

from hypercomm import RankLayout
from hypercomm.errors import LayoutError, WorldSizeError
from hypercomm.layout import read_layout
from hypercomm.layout.text import short_repr

pytestmark = pytest.mark.torch_free
LAYOUT = RankLayout([2, 3, 4], ["tp", "cp", "dp"])

# ---- forms of sizes -----------------------------------------------------------------------------


# Every form of the same sizes makes the same layout, in the constructor and in read_layout.
@pytest.mark.parametrize("read", [RankLayout, read_layout])
def test_every_form_of_sizes(read):
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


# An unspecified size is inferred so that the layout has all ranks of the world. If all sizes are
# specified, the layout may be smaller than the world.
def test_read_layout_in_a_world(monkeypatch):
    assert read_layout("tp=2,dp", rank_offset=4, world_size=12).ranks == range(4, 12)
    assert read_layout("tp=2,dp=2", world_size=12).size == 4
    monkeypatch.setenv("HYPERCOMM_LAYOUT", "tp=2,dp=-1")
    assert read_layout(None, world_size=6).shape == (2, 3)
    for change in (lambda name: monkeypatch.setenv(name, "tp:2"), monkeypatch.delenv):
        change("HYPERCOMM_LAYOUT")
        with pytest.raises(LayoutError, match="HYPERCOMM_LAYOUT"):
            read_layout(None)


# ---- text ---------------------------------------------------------------------------------------


# If sizes do not fit the world, the error names sizes that do: each of them alone is enough.
def test_sizes_that_would_fit():
    hints = 0
    for first, second, third, ranks in itertools.product((1, 2, 3, 8), (2, 6), (1, -1), (8, 12)):
        sizes = {"tp": first, "dp": second, "pp": third}
        try:
            RankLayout(sizes, world_size=ranks)
        except WorldSizeError as error:
            for dim, size in re.findall(r"(\w+)=(\d+)(?= or |\b would fit)", str(error)):
                assert RankLayout({**sizes, dim: int(size)}, world_size=ranks).size == ranks
                hints += 1
    assert hints > 20
    with pytest.raises(WorldSizeError, match=r"the world has 8; tp=4 or dp=4 would fit$"):
        RankLayout("tp=2,dp=2", world_size=8)
    for wrong in (
        lambda: read_layout("tp=2", rank_offset=8, world_size=8),
        lambda: read_layout(RankLayout([2, 4], ["tp", "dp"], strides=[1, 4]), world_size=8),
        lambda: read_layout(RankLayout("tp=2", ranks=[0, 10]), world_size=8),
    ):
        with pytest.raises(WorldSizeError) as caught:
            wrong()
        assert "would fit" not in str(caught.value)
    with pytest.raises(WorldSizeError, match=r"the world has 1000000000000000000000$"):
        RankLayout("tp=2,dp=2", world_size=10**21)


# Text that cannot be parsed fails fast and with a short message, however long it is.
@pytest.mark.parametrize("text", ["a" * 100_000, "a1" * 50_000, "a=" * 50_000, "tp=2 " * 20_000])
def test_long_text_fails_fast(text):
    begin = time.process_time()
    with pytest.raises(LayoutError) as caught:
        RankLayout(text)
    assert time.process_time() - begin < 0.1
    assert len(str(caught.value)) < 500


# Large values are truncated before they are formatted.
def test_short_repr_is_short():
    for value in ("a" * 10**7, [0] * 10**7, {"a" * 10**6: 1}, 10**5000, np.zeros(10**6)):
        assert len(short_repr(value)) < 500


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


# Every way to name the same dims is equivalent.
@pytest.mark.parametrize("dims", SPELLINGS)
def test_every_way_to_name_dims(dims):
    assert LAYOUT.order_dims(dims) == ("cp", "dp")
    assert LAYOUT.groups(*dims) == LAYOUT.groups("cp", "dp")
    assert LAYOUT.size_of(*dims) == 3 * 4


# size_of() of several dims is the product of their sizes. A missing dim has the default size.
@pytest.mark.parametrize("count", [1, 2, 3])
def test_sizes_multiply(count):
    sizes = {"tp": 2, "cp": 3, "dp": 4, "pp": 5}
    for dims in itertools.permutations(sizes, count):
        assert LAYOUT.size_of(*dims, default=5) == math.prod(sizes[dim] for dim in dims)
        if "pp" not in dims:
            assert LAYOUT.size_of("+".join(dims)) == LAYOUT.size_of(*dims, default=5)
