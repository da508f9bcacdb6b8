"""What is lost with ranks: against a walk over every rank and every combination of dims."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercomm import RankLayout
from hypercomm.errors import LayoutError, RankOutsideError, UnknownDimError
from hypercomm.layout.difference import MOST_DIMS, Lost, difference
from hypercomm.testing import layouts

pytestmark = [pytest.mark.quick, pytest.mark.torch_free]


def by_walking(layout, left, dims):
    """The shards over some dims that nobody is left with, one rank after the other."""
    held = {
        tuple(layout.coords(rank)[dim] for dim in dims) for rank in layout.ranks if rank in left
    }
    every = product(*(range(layout.size_of(dim)) for dim in reversed(dims)))
    return [dict(zip(dims, at[::-1], strict=True)) for at in every if tuple(at[::-1]) not in held]


@st.composite
def losses(draw):
    layout = draw(layouts(max_size=48))
    left = draw(st.sets(st.sampled_from(list(layout.ranks)), min_size=1))
    order = draw(st.permutations(sorted(left)))
    return layout, RankLayout([len(order)], ["rest"], ranks=order), left


# For any dims: the shards that a walk over all ranks finds nobody with;
# hold no other; and who has the shard of a rank.
@given(losses(), st.data())
def test_shards(case, data):
    layout, after, left = case
    lost = difference(layout, after).lost
    assert lost == Lost(layout, after)
    assert lost.ranks == tuple(sorted({*layout.ranks} - left))
    names = layout.dim_names
    every = [dims for count in range(1, len(names) + 1) for dims in combinations(names, count)]
    gone = {dims: by_walking(layout, left, dims) for dims in every}
    for dims in every:
        assert list(lost.shards(*data.draw(st.permutations(dims)))) == gone[dims]
    rank = data.draw(st.sampled_from(list(layout.ranks)))
    for dims in every:
        here = {dim: layout.coords(rank)[dim] for dim in dims}
        assert set(lost.replicas(rank, *dims)) == {
            one for one in left if here.items() <= layout.coords(one).items()
        }


# By hand: of tp=2, dp=4 rank 5 goes, at tp=1, dp=2. Ranks 1, 3 and 7 have tp=1, and rank 4 dp=2.
def test_by_hand():
    layout = RankLayout.parse("tp=2,dp=4")
    lost = Lost(layout, RankLayout([7], ["dp"], ranks=[0, 1, 2, 3, 4, 6, 7]))
    assert (lost.shards("tp"), lost.shards("dp")) == ((), ())
    assert lost.shards("dp", "tp") == ({"tp": 1, "dp": 2},)
    assert lost.replicas(5, "tp") == (1, 3, 7)
    assert lost.replicas(5, "dp") == (4,)
    assert lost.replicas(5, "tp", "dp") == ()
    assert str(lost).splitlines() == [
        "sharded over  shards  lost",
        "tp            2       none",
        "dp            4       none",
        "tp+dp         8       1: tp=1,dp=2",
        "tp=2,dp=4: 1 of 8 ranks is lost, 5: tp=1,dp=2",
    ]
    assert repr(lost) == "<Lost: tp=2,dp=4: 1 of 8 ranks is lost, 5: tp=1,dp=2>"
    assert Lost(layout, layout).summary == "tp=2,dp=4: no rank is lost"
    assert Lost(layout, layout).words == "none"


# A layout of one rank has one shard, and loses it with the rank.
def test_one_rank():
    layout = RankLayout.parse("tp=1,dp=1")
    lost = Lost(layout, RankLayout([1], ["dp"], ranks=[3]))
    assert str(lost).splitlines() == [
        "sharded over  shards  lost",
        "tp            1       1: tp=0",
        "tp=1,dp=1: 1 of 1 ranks is lost, 0: tp=0",
    ]


# A million ranks that lose a host of eight: a second at most, and no list of all of them.
def test_many_ranks():
    layout = RankLayout.parse("tp=8,cp=4,dp=1024,pp=32")
    left = [rank for rank in range(layout.size) if rank // 8 != 5]
    lost = Lost(layout, RankLayout([len(left)], ["rank"], ranks=left))
    assert lost.words == "40..47: cp=1,dp=1,pp=0"


# Layouts of more dims than can be combined say which ranks are lost, and answer for given dims.
def test_many_dims():
    names = [f"d{number}" for number in range(MOST_DIMS + 1)]
    layout = RankLayout([2] * len(names), names)
    lost = Lost(layout, RankLayout([2], ["dp"]))
    assert lost.words == "2..8191: d1=1; d2=1; d3=1; d4=1 and 8 more"
    assert lost.shards("d12") == ({"d12": 1},)
    table = str(lost).splitlines()
    assert table[:2] == ["sharded over  shards  lost", "d0            2       none"]
    assert table[2:14] == [f"{f'd{at}':14}2       1: d{at}=1" for at in range(1, 13)]


def test_bad_calls():
    layout = RankLayout.parse("tp=2,dp=2")
    lost = Lost(layout, layout)
    with pytest.raises(UnknownDimError):
        lost.shards("pp")
    with pytest.raises(LayoutError):
        lost.shards()
    with pytest.raises(RankOutsideError, match="rank 4 is not in layout tp=2,dp=2"):
        lost.replicas(4, "tp")
    with pytest.raises(LayoutError):
        lost.replicas("4", "tp")
