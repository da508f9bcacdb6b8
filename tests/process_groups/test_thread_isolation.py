"""Test that a creation changes no state of torch that another thread of the process sees."""

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fake_nccl import lone_world, recorded_nccl

from hypercomm import HyperCommGrid, join_world
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.torch_internals import capabilities, split

c10d = dist.distributed_c10d
CUDA_5 = torch.device("cuda", 5)
SWITCH = "TORCH_GLOO_LAZY_INIT"


def in_another_thread(function):
    """Call a function in another thread, and return its result."""
    returned = []
    thread = threading.Thread(target=lambda: returned.append(function()))
    thread.start()
    thread.join()
    return returned[0]


def visible_state():
    """Return the state of torch and the environment that the calling thread sees."""
    store = c10d.PrefixStore("p", dist.HashStore())
    group = dist.ProcessGroupGloo(store, 0, 1, timeout=timedelta(seconds=5))
    return {
        "world": dist.group.WORLD,
        "bound to": getattr(dist.group.WORLD, "bound_device_id", None),
        "environment": dict(os.environ),
        "store": (type(store), store.underlying_store is not None),
        "devices of gloo": len(group.options._devices),
        "name": len(c10d._process_group_name([0, 1], use_hashed_name=True)),
    }


@pytest.fixture
def seen(monkeypatch):
    """Collect the state that another thread sees during each creation of a group."""
    found = []

    def watched(*args, **given):
        found.append(in_another_thread(visible_state))
        return helper(*args, **given)

    helper = c10d._new_process_group_helper
    monkeypatch.setattr(c10d, "_new_process_group_helper", watched)
    return found


@pytest.mark.parametrize("environment", [None, "0", "1"])
@pytest.mark.parametrize("creation", ["local", "enumerate"])
@pytest.mark.parametrize("lazily", [None, False, True])
def test_gloo_creation(seen, monkeypatch, environment, creation, lazily):
    monkeypatch.delenv(SWITCH, raising=False)
    if environment is not None:
        monkeypatch.setenv(SWITCH, environment)
    with lone_world("gloo", 1):
        before = visible_state()
        seen.clear()
        with HyperCommGrid("tp=1,dp=1", creation=creation, lazy_init=lazily) as grid:
            grid.create_pgs(["tp", "dp", {"dims": "tp", "name": "more"}])
            assert seen == [before] * 3
        assert visible_state() == before


@pytest.mark.parametrize("lazily", [None, False, True])
def test_creation_on_a_bound_world(seen, lazily):
    with recorded_nccl(), lone_world("nccl", 8, rank=5, device_id=CUDA_5):
        before = visible_state()
        assert before["bound to"] == CUDA_5
        seen.clear()
        with HyperCommGrid([2, 2], ["tp", "dp"], rank_offset=4, lazy_init=lazily) as grid:
            grid.create_pgs(["tp", "dp"])
            assert seen == [before] * 2
        assert visible_state() == before


def test_split(monkeypatch):
    found = []

    def watched(*args, **given):
        found.append(in_another_thread(visible_state))
        return split(*args, **given)

    split = dist.split_group
    monkeypatch.setattr(dist, "split_group", watched)
    with recorded_nccl(), lone_world("nccl", 8, rank=5, device_id=CUDA_5):
        before = visible_state()
        with HyperCommGrid([2, 4], ["tp", "dp"], creation="split") as grid:
            grid.create_pgs(["tp", "dp"])
        assert found == [before] * 2


@pytest.mark.skipif(not capabilities.since("2.14"), reason="torch has it since 2.14")
def test_reconfigurable_groups(seen):
    with lone_world("gloo", 1):
        before = visible_state()
        seen.clear()
        with HyperCommGrid("tp=1", enable_reconfigure=True) as grid:
            grid.create_pg("tp")
            assert seen == [before]


# During the creation, WORLD appears to the creating thread to have no device. Other threads see the
# device, and hypercomm still finds the device.
@pytest.mark.skipif(capabilities.since("2.15"), reason="torch has a switch since 2.15")
def test_creating_thread_sees_world_unbound():
    timeout = timedelta(seconds=5)
    with recorded_nccl(), lone_world("nccl", 8, rank=5, device_id=CUDA_5):
        with split.without_split("nccl", None, timeout, lazily=None):
            assert dist.group.WORLD.bound_device_id is None
            assert torchdist.bound_device() == CUDA_5
            assert in_another_thread(lambda: dist.group.WORLD.bound_device_id) == CUDA_5
        assert dist.group.WORLD.bound_device_id == CUDA_5


def test_joined_world(seen):
    before = visible_state()
    who = {"parts": {"engine": 1}, "part": "engine", "rank": 0}
    with (
        join_world(dist.HashStore(), name="w", **who) as world,
        HyperCommGrid("tp=1", world=world) as grid,
    ):
        grid.device_mesh()
        assert seen == [before] * 2
        with world.as_default():  # the one change that other threads see, as documented
            assert in_another_thread(lambda: dist.group.WORLD) is world.pg
        assert visible_state() == before
