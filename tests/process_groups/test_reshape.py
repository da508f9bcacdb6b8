"""Test in fake worlds which groups a rank keeps, creates and destroys in a reshape."""

import math
from collections import Counter
from datetime import timedelta

import pytest
import torch.distributed as dist
from example_counts import examples
from hypothesis import given, settings, strategies as st
from numpy_oracle import group_of
from torch.distributed.device_mesh import init_device_mesh

from hypercomm import GroupKey, HyperCommGrid, RankLayout
from hypercomm.errors import GridDestroyedError, LayoutError, UnknownDimError, WorldSizeError
from hypercomm.testing import dim_subsets, fake_world, registered_groups

NAMES = ("tp", "cp", "dp", "pp")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
OPTIONS = [{}, {"timeout": timedelta(minutes=7)}]


@st.composite
def shapes(draw, size):
    """Draw a shape with named dims for `size` ranks, with sizes and names in any order."""
    names = draw(st.permutations(NAMES))
    shape = []
    for _ in range(draw(st.integers(0, 3))):
        fitting = [n for n in range(1, size + 1) if (size // math.prod(shape)) % n == 0]
        shape.append(draw(st.sampled_from(fitting)))
    shape.append(size // math.prod(shape))
    return shape, names[: len(shape)]


@st.composite
def orders(draw, size, offset):
    """Draw the ranks of a grid: usually in order, sometimes swapped or permuted."""
    ranks = list(range(offset, offset + size))
    kind = draw(st.sampled_from(["in order", "in order", "swapped", "permuted"]))
    if kind == "permuted":
        return draw(st.permutations(ranks))
    if kind == "swapped":
        one, other = draw(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)))
        ranks[one], ranks[other] = ranks[other], ranks[one]
    return ranks


# For any two layouts, any keys and any rank, each remaining key has a group with the ranks that
# numpy finds. If an old group has the same ranks and options, it is used again, preferably the old
# group of the same key. As many groups as possible are kept, and torch has no other groups.
@settings(max_examples=examples(1200), database=None)
@given(st.data())
def test_kept_groups(data):
    size = data.draw(st.sampled_from(SIZES))
    offset = data.draw(st.integers(0, 2))
    shape, names = data.draw(shapes(size))
    new_shape, new_names = data.draw(shapes(size))
    order = data.draw(orders(size, offset))
    # With the same order of ranks, more groups are kept under another name.
    new_order = data.draw(st.one_of(st.just(order), orders(size, offset)))
    rank = data.draw(st.sampled_from(order))
    source = RankLayout(shape, names, ranks=order)
    target = RankLayout(new_shape, new_names, ranks=new_order)
    count = data.draw(st.integers(1, 9))
    with fake_world(offset + size + 1, rank), HyperCommGrid(source) as grid:
        old = {}
        for _ in range(count):
            dims = data.draw(dim_subsets(source))
            name = data.draw(st.sampled_from([None, "twin"]))
            options = data.draw(st.sampled_from(OPTIONS))
            key = frozenset(dims), name
            if key not in old:
                ranks = tuple(group_of(shape, names, order, dims, rank))
                group = grid.create_pg(dims, name=name, **options)
                old[key] = (ranks, bool(options)), group
        result = grid.reshape(target)
        new = {
            key: (tuple(group_of(new_shape, new_names, new_order, key[0], rank)), what[1])
            for key, (what, _) in old.items()
            if key[0] <= set(new_names)
        }
        assert {plain(key) for key in grid.pgs} == set(new)
        for key, group in grid.pgs.items():
            assert dist.get_process_group_ranks(group) == list(new[plain(key)][0])
            assert grid.get_pg(key.dims, name=key.name) is group
        kept = {plain(after): plain(before) for after, before in result.kept}
        pgs = {plain(key): group for key, group in grid.pgs.items()}
        for after, before in kept.items():
            assert new[after] == old[before][0]
            assert pgs[after] is old[before][1]
        assert len(set(kept.values())) == len(kept)
        wanted = Counter(new.values())
        available = Counter(what for what, _ in old.values())
        assert len(kept) == (wanted & available).total()
        for key, what in new.items():
            if what == old[key][0]:
                assert kept[key] == key
        assert {plain(key) for key in result.created} == set(new) - set(kept)
        gone = set(old) - set(kept.values())
        assert {plain(key) for key in result.destroyed} == gone
        registered = registered_groups()
        assert registered == {dist.group.WORLD, *pgs.values()}
        assert grid.layout == target


def plain(key):
    return frozenset(key.dims), key.name


# One size of the target may be unspecified. The offset, gaps or list of ranks stay.
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (RankLayout([2, 4], ["tp", "dp"], 3), [3, 4, 5, 6]),
        (RankLayout([2, 2, 4], ["tp", "pp", "dp"]).select(pp=1), [2, 3, 6, 7]),
        (RankLayout([8], ["dp"], ranks=[9, 8, 1, 0, 5, 4, 3, 2]), [9, 8, 1, 0]),
    ],
)
def test_unspecified_sizes(layout, ranks):
    with fake_world(16, ranks[1]), HyperCommGrid(layout) as grid:
        grid.create_pg("dp")
        grid.reshape("dp=4,tp=-1")
        assert list(grid.layout.ranks) == list(layout.ranks)
        assert grid.shape == [4, 2]
        assert dist.get_process_group_ranks(grid.get_pg("dp")) == ranks
        grid.reshape("dp=2,tp")
        assert dist.get_process_group_ranks(grid.get_pg("dp")) == ranks[:2]


# Derived groups are computed again, and kept if they have not changed. A rank in none of these
# groups still gets None.
def test_derived_groups_are_kept_if_unchanged():
    def ends(groups):
        return groups.pick(lambda ranks: (ranks[0], ranks[-1]))

    for rank, is_end in ((0, True), (2, False), (6, True)):
        with fake_world(8, rank), HyperCommGrid([2, 4], ["tp", "pp"]) as grid:
            group = grid.create_pg("pp", name="ends", derive=ends)
            assert (group is not None) == is_end
            result = grid.reshape("dp=2,pp=4")
            assert grid.get_pg("pp", name="ends") is group
            assert str(result).endswith("kept: pp (ends)\n  created: none\n  destroyed: none")
            result = grid.reshape("pp=4,dp=2")
            again = grid.get_pg("pp", name="ends")
            members = [0, 3] if rank < 4 else [4, 7]
            if rank in members:
                assert dist.get_process_group_ranks(again) == members
            else:
                assert again is None


# With creation="enumerate", a rank keeps its group only if all ranks keep their groups.
def test_enumerated_groups_are_kept_on_all_ranks_or_none():
    order = [0, 1, 2, 3, 4, 6, 5, 7]
    for creation, is_kept in (("local", True), ("enumerate", False)):
        with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"], creation=creation) as grid:
            tp = grid.create_pg("tp")
            grid.reshape(RankLayout([2, 4], ["tp", "dp"], ranks=order))
            assert (grid.get_pg("tp") is tp) == is_kept
            grid.reshape("tp=2,dp=2,cp=2")
            assert len(registered_groups()) == 2


# The groups of a DeviceMesh are used for their dim as long as the groups of this dim do not change.
# They are never destroyed, and are not used for other keys.
def test_groups_of_a_device_mesh_are_never_destroyed():
    with fake_world(8, rank=5):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        theirs = registered_groups()
        with HyperCommGrid.from_device_mesh(mesh) as grid:
            dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
            grid.create_pg(["tp", "dp"])
            grid.reshape("tp=2,cp=2,dp=2")
            assert grid.get_pg("tp") is tp
            assert grid.get_pg("dp") not in theirs
            assert dist.get_process_group_ranks(grid.get_pg("dp")) == [1, 5]
            assert theirs < registered_groups()
            assert grid.explain("tp").strategy == "adopted"
            result = grid.reshape("cp=2,tp=4")
            assert grid.get_pg("tp") is not tp
            assert GroupKey(("tp",)) in result.destroyed
        assert registered_groups() == theirs
        assert dp in theirs


# Groups move from the grid to its view and back. If the grid loses a shared dim, the dim belongs
# only to the view until the grid has it again.
def test_groups_move_between_grid_and_view():
    with fake_world(16, rank=5), HyperCommGrid([2, 4, 2], ["tp", "dp", "pp"]) as grid:
        grid.register_view("expert", [4, 2, 2], ["ep", "edp", "pp"], ["pp"])
        tp, pp = grid.create_pgs(["tp", "pp"])
        ep = grid.create_pg("ep", view="expert")
        grid.reshape("tp=4,dp=2,pp=2", views={"expert": "ep=2,edp=4,pp=2"})
        assert [grid.get_pg("tp"), grid.get_pg("ep", view="expert")] == [ep, tp]
        assert grid.get_pg("pp") is grid.get_pg("pp", view="expert") is pp
        result = grid.reshape("tp=16", views={"expert": "ep=16"})
        assert [*map(str, result.destroyed)] == ["tp", "pp", "ep of expert"]
        grid.reshape("tp=2,dp=4,pp=2", views={"expert": "ep=8,pp=2"})
        assert grid.create_pg("pp") is grid.get_pg("pp", view="expert")


TARGETS = [
    ("tp=4,dp=4", None, WorldSizeError, "16 ranks"),
    ("tp=x", None, LayoutError, "tp=x"),
    (RankLayout([4], ["dp"]), None, WorldSizeError, r"4\.\.7"),
    ([2, 4], None, LayoutError, "dim_names"),
    ("tp=2,dp=2,pp=2", None, LayoutError, "shared"),
    ("tp=8", {"expert": "ep=3,e=-1"}, LayoutError, "expert"),
    ("tp=8", {"other": "ep=8"}, UnknownDimError, "other"),
    ("tp=8", ["expert"], TypeError, "list"),
]


def state_of(grid):
    return grid.layout, dict(grid.views), list(grid.pgs.items()), registered_groups()


# An impossible target or a view that does not fit raises, and nothing changes.
@pytest.mark.parametrize(("target", "views", "error", "names"), TARGETS)
def test_impossible_targets_change_nothing(target, views, error, names):
    with fake_world(16), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
        grid.register_view("expert", [4, 2], ["ep", "dp2"], [])
        grid.register_view("shared", [2, 4], ["ep", "dp"], ["dp"])
        grid.create_pgs(["tp", {"dims": "ep", "view": "expert"}])
        before = state_of(grid)
        with pytest.raises(error, match=names):
            grid.reshape(target, views=views)
        assert state_of(grid) == before
        grid.reshape("tp=2,dp=4")


# Keys that share a group before a reshape also share a group afterwards. A key that may not share
# keeps a separate group.
def test_shared_keys_stay_shared():
    with fake_world(8, rank=5), HyperCommGrid([2, 1, 4], ["tp", "cp", "dp"]) as grid:
        dp = grid.create_pg("dp", share="identical")
        assert grid.create_pg(["cp", "dp"], share="identical") is dp
        own = grid.create_pg("dp", name="own")
        grid.reshape("cp=1,tp=2,dp=4")
        assert grid.get_pg("dp") is grid.get_pg(["dp", "cp"]) is dp
        assert grid.get_pg("dp", name="own") is own
        assert len(grid.reshape("tp=4,cp=1,dp=2").created) == 3
        one = grid.get_pg("dp")
        assert one is grid.get_pg(["cp", "dp"]) is not grid.get_pg("dp", name="own")
        assert dist.get_process_group_ranks(one) == [1, 5]
        assert registered_groups() == {dist.group.WORLD, one, grid.get_pg("dp", name="own")}
        result = grid.reshape("tp=4,dp=2")
        # Only the key is destroyed, because dp uses the group.
        assert list(map(str, result.destroyed)) == ["cp+dp"]
        assert grid.get_pg("dp") is one
        assert grid.explain("dp").served_by is None


# A rank outside the grid has None before and after a reshape. In a grid without a world, a reshape
# changes only the dims.
def test_rank_outside_and_grid_without_world():
    with fake_world(8, rank=7), HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        grid.create_pg("tp")
        assert str(grid.reshape("tp=4")).startswith("tp=2,dp=2 -> tp=4\n  kept: tp\n")
        assert grid.get_pg("tp") is None
        with pytest.raises(UnknownDimError):
            grid.get_pg("dp")
    grid = HyperCommGrid([2, 4], ["tp", "dp"], world_size=8)
    assert str(grid.reshape("tp=4,dp=2")).startswith("tp=2,dp=4 -> tp=4,dp=2\n  kept: none")
    assert grid.get_rank_enum("dp")[0] == [0, 4]
    grid.destroy()
    with pytest.raises(GridDestroyedError):
        grid.reshape("tp=8")
