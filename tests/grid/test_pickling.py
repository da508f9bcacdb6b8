"""Test that grids cannot be pickled or copied, and that their layouts can."""

import copy
import pickle

import pytest

from hypercomm import GridSet, HyperCommGrid


# Pickling or copying a grid raises. The error names the layout, which can be sent instead.
@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_grid_cannot_be_pickled_or_copied(send):
    grid = HyperCommGrid("tp=2,dp=4", world_size=8)
    grid.register_view("expert", [4, 2], ["ep", "edp"])
    grids = GridSet.tile(8, encoder="tp=2,dp=2", llm="tp=4")
    for owner in (grid, grid.view("expert"), grids):
        with pytest.raises(TypeError, match="cannot be pickled or copied: ") as caught:
            send(owner)
        assert str(caught.value).startswith(repr(owner))
    if send is not copy.copy:  # a shallow copy of dims is the same dims
        for part in (grid["tp"], grid.edges("dp")):
            with pytest.raises(TypeError, match=r"tp=2,dp=4\) cannot be pickled or copied: "):
                send(part)
    assert HyperCommGrid(pickle.loads(pickle.dumps(grid.layout)), world_size=8).shape == [2, 4]
    again = GridSet(pickle.loads(pickle.dumps(dict(grids.layouts))), world_size=8)
    assert again.layouts == grids.layouts
