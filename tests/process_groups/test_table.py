"""Test a grid's table of groups with several threads. An entry is reserved, live or ended."""

import threading

import pytest
import torch.distributed as dist
from group_checks import registered

from hypercomm import GridSet, HyperCommGrid
from hypercomm.errors import CreationError, GridDestroyedError, GroupExistsError
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.testing import fake_world

LONG_S = 20


class Gate:
    """Blocks the first creation of a group until `opened` is set. Then raises `error`, if given."""

    def __init__(self, monkeypatch):
        self.arrived, self.opened = threading.Event(), threading.Event()
        self.error = None
        self.names = []
        self._new_group = torchdist.new_group
        monkeypatch.setattr(torchdist, "new_group", self._create)

    def _create(self, name, ranks, **options):
        self.names.append(name)
        if len(self.names) == 1:
            self.arrived.set()
            assert self.opened.wait(LONG_S)
            if self.error is not None:
                raise self.error
        return self._new_group(name, ranks, **options)


class Thread(threading.Thread):
    """A thread that keeps the result or the error of its function."""

    def __init__(self, function, *args, **keywords):
        super().__init__(daemon=True)
        self.call = function, args, keywords
        self.result = None
        self.start()

    def run(self):
        function, args, keywords = self.call
        try:
            self.result = function(*args, **keywords)
        except Exception as error:  # noqa: BLE001 - the test compares it
            self.result = error

    def outcome(self):
        self.join(LONG_S)
        assert not self.is_alive()
        return self.result


@pytest.fixture
def gate(monkeypatch) -> Gate:
    return Gate(monkeypatch)


# While another thread creates a key, create_pg raises, and ensure_pg waits and returns the group.
def test_two_threads_create_one_key(gate):
    with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4") as grid:
        first = Thread(grid.create_pg, "tp")
        assert gate.arrived.wait(LONG_S)
        with pytest.raises(GroupExistsError, match=r"another thread is creating .*'tp'; wait"):
            grid.create_pg("tp")
        second = Thread(grid.ensure_pg, "tp")
        second.join(0.05)
        assert second.is_alive()
        assert dict(grid.pgs) == {}
        gate.opened.set()
        assert first.outcome() is second.outcome() is grid.get_pg("tp")
        assert len(gate.names) == 1


# If a creation fails while other threads wait for it, one of these threads creates the group. This
# holds for threads with the same key, and with another key that shares the group.
@pytest.mark.parametrize("name", [None, "twin"])
def test_second_thread_creates_after_a_failure(gate, name):
    with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4", share="identical") as grid:
        gate.error = RuntimeError("out of sockets")
        first = Thread(grid.create_pg, "tp")
        assert gate.arrived.wait(LONG_S)
        second = Thread(grid.ensure_pg, "tp", name=name)
        second.join(0.05)
        assert second.is_alive()
        gate.opened.set()
        assert isinstance(first.outcome(), CreationError)
        assert second.outcome() is grid.get_pg("tp", name=name)
        assert [key.name for key in grid.pgs] == [name]
        assert len(gate.names) == 2


# If a key shares a group, its thread waits for the thread that creates the group.
def test_sharing_waits_for_the_creation(gate):
    with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4", share="identical") as grid:
        first = Thread(grid.create_pg, "tp")
        assert gate.arrived.wait(LONG_S)
        second = Thread(grid.create_pgs, [{"dims": "tp", "name": "twin"}, "dp"])
        second.join(0.05)
        assert second.is_alive()
        gate.opened.set()
        twin, _ = second.outcome()
        assert first.outcome() is twin
        assert [str(key) for key in grid.pgs] == ["tp", "tp (twin)", "dp"]


# If a grid is destroyed while it creates a group, neither the grid nor torch keeps the group.
def test_destroy_during_a_creation(gate):
    with fake_world(8, rank=5):
        before = registered()
        grid = HyperCommGrid("tp=2,dp=4")
        creation = Thread(grid.create_pg, "tp")
        assert gate.arrived.wait(LONG_S)
        grid.destroy()
        gate.opened.set()
        assert isinstance(creation.outcome(), GridDestroyedError)
        assert registered() == before


# Groups are listed in the order in which they were created, not in the order of the calls.
def test_groups_are_listed_in_creation_order(gate):
    with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4") as grid:
        first = Thread(grid.create_pg, "tp")
        assert gate.arrived.wait(LONG_S)
        grid.create_pg("dp")
        gate.opened.set()
        first.outcome()
        assert [str(key) for key in grid.pgs] == ["dp", "tp"]


# reshape() raises while another thread creates a key, and names the key. The grid does not change.
def test_reshape_during_a_creation_raises(gate):
    with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4") as grid:
        first = Thread(grid.create_pg, "tp")
        assert gate.arrived.wait(LONG_S)
        with pytest.raises(CreationError, match="creating the process groups over tp; reshape"):
            grid.reshape("tp=4,dp=2")
        gate.opened.set()
        assert dist.get_process_group_ranks(first.outcome()) == [4, 5]


# Two grids of a set share groups that one call creates. If one grid destroys a shared group, the
# other grid keeps the group.
def test_set_shares_groups_created_in_one_call():
    with (
        fake_world(8, rank=5),
        GridSet.colocated(train="tp=2,dp", infer="tp=2,dp", share="identical") as grids,
    ):
        created = grids.create_pgs({"train": ["tp"], "infer": ["tp", "dp"]})
        assert created["train"][0] is created["infer"][0]
        grids["infer"].destroy_pg("tp")
        assert grids["train"].get_pg("tp") is created["train"][0]
        assert torchdist.is_registered(created["train"][0])
        grids["train"].destroy_pg("tp")
        assert not torchdist.is_registered(created["train"][0])
