"""Test the groups of views against numpy, their creation in a fake world, and errors."""

import numpy as np
import pytest
import torch.distributed as dist
from drawn_layouts import groups_of
from example_counts import examples
from hypothesis import given, settings, strategies as st

from hypercomm import HyperCommGrid
from hypercomm.errors import (
    GridDestroyedError,
    GroupExistsError,
    GroupMissingError,
    LayoutError,
    UnknownDimError,
)
from hypercomm.testing import (
    dim_subsets,
    fake_world,
    layouts,
    ranks_of,
    registered_groups,
    views_of,
)

NEW_NAMES = ("e1", "e2", "e3", "e4")


def groups_by_numpy(ranks, shape, names, dims):
    """List the groups over some dims."""
    axes = [names.index(dim) for dim in ([dims] if isinstance(dims, str) else dims)]
    return list(map(list, groups_of(np.reshape(list(ranks), shape, order="F"), axes)))


@st.composite
def views(draw, layout):
    """Draw the shape and names of a view that keeps some dims of the layout, sometimes reversed."""
    kept = draw(st.lists(st.sampled_from(layout.dim_names), unique=True))
    names = [*NEW_NAMES, *(name for name in layout.dim_names if name not in kept)]
    view = draw(views_of(layout, dim_names=names, shared_dims=kept))
    step = draw(st.sampled_from([1, 1, 1, -1]))
    return list(view.shape)[::step], list(view.dim_names)[::step]


def grid_of(layout):
    return HyperCommGrid(layout, world_size=layout.last_rank + 1)


# The groups of a view of a dense, shifted or listed layout are the groups that numpy finds, in the
# same order. The grid and the view object return the same groups.
@pytest.mark.full
@settings(max_examples=examples(1000))
@given(st.data(), st.booleans())
def test_groups_of_views_agree_with_numpy(data, listed):
    layout = data.draw(layouts(max_ranks=64, listed=listed))
    shape, names = data.draw(views(layout))
    grid = grid_of(layout)
    grid.register_view("other", shape, names)
    view = grid.view("other")
    dims, rank = data.draw(dim_subsets(view.layout)), data.draw(ranks_of(layout))
    groups = groups_by_numpy(layout.ranks, shape, names, dims)
    assert grid.get_rank_enum(dims, view="other") == groups
    assert view.get_rank_enum(dims) == groups
    assert list(map(list, view.layout.groups(*dims))) == groups
    assert list(view.group_ranks(dims, rank)) == next(group for group in groups if rank in group)
    assert (view.shape, view.dim_names, view.size) == (shape, names, layout.size)
    index = np.unravel_index(list(layout.ranks).index(rank), shape, order="F")
    assert view.coords(rank) == dict(zip(names, map(int, index), strict=True))


# Dims can be shared if and only if each of them, and all of them together, make the same groups in
# the same order in the base layout and in the view. A rejected view changes nothing, and its name
# can be used again.
@settings(max_examples=examples(1500))
@given(st.data(), st.booleans())
def test_shared_dims_make_the_same_groups(data, listed):
    layout = data.draw(layouts(min_dims=2, max_ranks=64, listed=listed))
    shape, names = data.draw(views(layout))
    common = [name for name in names if name in layout.dim_names]
    shared = data.draw(st.lists(st.sampled_from(common), unique=True)) if common else []
    base = layout.ranks, list(layout.shape), list(layout.dim_names)
    fits = all(
        groups_by_numpy(*base, dims) == groups_by_numpy(layout.ranks, shape, names, dims)
        for dims in [*([dim] for dim in shared), shared]
        if dims
    )
    grid = grid_of(layout)
    if not fits:
        with pytest.raises(LayoutError, match="different membership"):
            grid.register_view("other", shape, names, shared)
        assert dict(grid.views) == {}
        shared = []
    grid.register_view("other", shape, names, shared)
    assert grid.views["other"].dim_names == tuple(names)


def expert_grid(**options):
    """Return the grid tp=2,dp=4,pp=2 with a view ep=4,edp=2,pp=2 that shares pp."""
    grid = HyperCommGrid([2, 4, 2], ["tp", "dp", "pp"], **options)
    grid.register_view("expert", [4, 2, 2], ["ep", "edp", "pp"], ["pp"])
    return grid


# Over shared dims, a view uses the group of the grid. Creating this group again raises KeyError, on
# the grid and on the view, as in Megatron. Over other dims, even together with shared dims, the
# view has separate groups.
def test_shared_and_private_groups():
    with fake_world(16, rank=5), expert_grid() as grid:
        view = grid.view("expert")
        before = registered_groups()
        pp = grid.create_pg("pp", view="expert")
        assert grid.get_pg("pp") is view.get_pg(["pp"]) is pp
        for again in (grid, view):
            with pytest.raises(GroupExistsError, match="already been created"):
                again.create_pg("pp")
        members = {
            grid.create_pg("dp"): [1, 3, 5, 7],
            view.create_pg("edp"): [1, 5],
            view.create_pg(["pp", "edp"]): [1, 5, 9, 13],
            grid.create_pg(["pp", "dp"]): [1, 3, 5, 7, 9, 11, 13, 15],
        }
        for group, ranks in members.items():
            assert dist.get_process_group_ranks(group) == ranks
        assert registered_groups() - before == {pp, *members}
        assert list(map(str, grid.pgs)) == [
            "pp",
            "dp",
            "edp of expert",
            "edp+pp of expert",
            "dp+pp",
        ]
        assert list(map(str, view.pgs)) == ["pp", "edp of expert", "edp+pp of expert"]


# If dims belong to another view, the error names that view. Dims of two views cannot be combined.
@pytest.mark.parametrize(
    ("dims", "view", "error", "message"),
    [
        (["pp", "ep"], None, UnknownDimError, r"use grid\.view\('expert'\)"),
        ("ep", "base", UnknownDimError, r"use grid\.view\('expert'\)"),
        ("tp", "expert", UnknownDimError, r"use grid\.view\('base'\)"),
        (["tp", "ep"], "expert", UnknownDimError, "no view has all of these dims"),
        ("xx", "expert", UnknownDimError, "'xx'"),
        ("tp", "other", UnknownDimError, "'other' is not registered .*'expert'"),
        ([], "expert", LayoutError, "no dims are given"),
        (["ep", "ep"], "expert", LayoutError, "is listed twice"),
    ],
)
def test_dims_of_the_wrong_view(dims, view, error, message):
    with fake_world(16), expert_grid() as grid:
        for call in (
            grid.create_pg,
            grid.get_pg,
            grid.ensure_pg,
            grid.explain,
            grid.destroy_pg,
            grid.get_rank_enum,
            lambda dims, view: grid.create_pgs([{"dims": dims, "view": view}]),
        ):
            with pytest.raises(error, match=message):
                call(dims, view=view)
        if view != "other":
            asked = grid.view("expert") if view == "expert" else grid
            for call in (asked.group_ranks, asked.device_mesh, asked.__getitem__):
                with pytest.raises(error, match=message):
                    call(dims)
        assert dict(grid.pgs) == {}


# Once a grid is destroyed, its views can create no groups.
def test_views_of_a_destroyed_grid():
    with fake_world(16):
        grid = expert_grid()
        view = grid.view("expert")
        group = view.create_pg("ep")
        grid.destroy()
        assert group not in registered_groups()
        assert view.get_rank_enum("edp")[0] == [0, 4]
        for call in (view.create_pg, view.get_pg, view.destroy_pg, view.device_mesh):
            with pytest.raises(GridDestroyedError):
                call("ep")
        with pytest.raises(GridDestroyedError):
            grid.register_view("late", [16], ["all"])


# create_pgs, ensure_pg, explain and device_mesh accept view=, or can be called on a view object.
def test_every_call_accepts_a_view():
    with fake_world(16, rank=5), expert_grid() as grid:
        view = grid.view("expert")
        asked = [{"dims": dims, "view": "expert"} for dims in ("ep", "pp")]
        ep, pp, dp = grid.create_pgs([*asked, "dp"])
        assert [view.get_pg("ep"), grid.get_pg("pp"), grid.get_pg("dp")] == [ep, pp, dp]
        with pytest.raises(GroupExistsError, match="twice in one call"):
            grid.create_pgs(["tp", {"dims": "tp", "view": "base"}])
        both = grid.ensure_pg(["ep", "edp"], view="expert")
        assert (both.size(), both.rank()) == (8, 5)
        assert view.ensure_pg(["edp", "ep"]) is both
        assert str(grid.explain("ep", view="expert")).startswith(
            "ep of expert: 4 groups of 4 ranks"
        )
        view.create_pg("edp")
        mesh = view.device_mesh("pp", "edp", "ep")
        assert mesh.mesh.tolist() == np.arange(16).reshape(2, 2, 4).tolist()
        assert mesh.get_group("ep") is ep
        assert "view expert (ep=4,edp=2,pp=2)" in repr(view)


# With share="identical", the grid and its views share equal groups. tp=2 and etp=2 share one group,
# which is destroyed with the last of its keys. A group with other options is separate.
def test_groups_are_shared_across_views():
    with fake_world(8, rank=5), HyperCommGrid([2, 4], ["tp", "dp"], share="identical") as grid:
        grid.register_view("expert", [2, 2, 2], ["etp", "ep", "edp"])
        before = registered_groups()
        tp, whole = grid.create_pg("tp"), grid.create_pg("ep+edp", view="expert")
        assert grid.create_pg("etp", view="expert") is tp
        assert grid.explain("etp", view="expert").served_by == "tp"
        assert grid.create_pg("dp") is whole
        assert grid.create_pg("etp", view="expert", name="own", share="never") is not tp
        assert len(registered_groups() - before) == 3
        grid.destroy_pg("tp")
        assert tp in registered_groups()
        assert grid.create_pg("tp") is tp
        assert grid.explain("tp").served_by == "etp of expert"
        grid.destroy_pg("etp", view="expert")
        grid.destroy_pg("tp")
        assert tp not in registered_groups()


# Destroying an unknown key raises KeyError and changes nothing. Destroying a key keeps the other
# keys. A destroyed key can be created again, with another group name in torch.
def test_destroy_pg_destroys_one_group():
    with fake_world(16, rank=5), expert_grid() as grid:
        tp, pp, ep = grid.create_pgs(["tp", "pp", {"dims": "ep", "view": "expert"}])
        before = registered_groups()
        for options in (
            {"dims": "dp"},
            {"dims": "tp", "name": "b"},
            {"dims": "edp", "view": "expert"},
        ):
            with pytest.raises(GroupMissingError):
                grid.destroy_pg(**options)
        for options in ({"dims": "xx"}, {"dims": []}, {"dims": "ep", "view": "none"}):
            with pytest.raises(LayoutError):
                grid.destroy_pg(**options)
        assert registered_groups() == before
        grid.device_mesh("tp")
        grid.destroy_pg("tp")
        grid.destroy_pg("pp", view="expert")  # pp is shared, so this is the grid's group
        assert registered_groups() == before - {tp, pp}
        assert list(map(str, grid.pgs)) == ["ep of expert"]
        assert grid.create_pg("tp").group_name != tp.group_name
        assert ep in registered_groups()
