"""What a person sees of what the library makes: one line, many lines, errors that name it."""

import copy
import pickle

import pytest

from hypercomm import GridSet, HyperCommGrid
from hypercomm.errors import (
    GroupOptionsError,
    LayoutError,
    UnknownDimError,
)
from hypercomm.testing import fake_world


# A word that is nearly right is proposed: keywords, choices, names of grids.
@pytest.mark.parametrize(
    ("call", "error", "meant"),
    [
        (lambda grids: grids["encodr"], UnknownDimError, "encoder"),
        (lambda grids: grids["llm"].ensure_pg("tp", timout=3), TypeError, "timeout"),
        (lambda grids: grids["llm"].create_pgs([{"dims": "tp", "nam": 1}]), TypeError, "name"),
        (lambda grids: grids["llm"].create_pg("tp", creation="locl"), GroupOptionsError, "local"),
        (lambda _: GridSet(a="tp=8", requires="tile", world_size=8), LayoutError, "tiled"),
    ],
)
def test_did_you_mean(call, error, meant):
    with (
        fake_world(8),
        GridSet.tile(encoder="tp=2,dp=2", llm="tp=4") as grids,
        pytest.raises(error, match=f"; did you mean '{meant}'\\?$"),
    ):
        call(grids)


# A grid stays in its process, and says what travels in its place.
@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_grid_is_no_value(send):
    grid = HyperCommGrid("tp=2,dp=4", world_size=8)
    grid.register_view("expert", [4, 2], ["ep", "edp"])
    grids = GridSet.tile(8, encoder="tp=2,dp=2", llm="tp=4")
    for owner in (grid, grid.view("expert"), grids):
        with pytest.raises(TypeError, match="cannot be pickled or copied: ") as caught:
            send(owner)
        assert str(caught.value).startswith(repr(owner))
    assert HyperCommGrid(pickle.loads(pickle.dumps(grid.layout)), world_size=8).shape == [2, 4]
    again = GridSet(pickle.loads(pickle.dumps(dict(grids.layouts))), world_size=8)
    assert again.layouts == grids.layouts
