"""What a person sees of what the library makes: one line, many lines, errors that name it."""

import copy
import pickle

import pytest

from hypercomm import GridSet, HyperCommGrid


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
