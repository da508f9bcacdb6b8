"""Test that each call uses the world that it names, with two worlds in threads of a process."""

import random
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from hypercomm import HyperCommGrid, join_world
from hypercomm.errors import LayoutError

ALONE = {"parts": {"engine": 1}, "part": "engine", "rank": 0}
SUMS = 60


def alone(name):
    """Return a world with only the calling rank."""
    return join_world(dist.HashStore(), name=name, **ALONE)


class Repeated:
    """Calls a function in another thread, repeatedly, during a `with` block."""

    def __init__(self, function):
        self.calls = 0
        self.errors = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(function,))

    def _run(self, function):
        while not self._is_over.is_set():
            try:
                function()
            except Exception as error:  # noqa: BLE001 - the test raises it
                self.errors.append(error)
                return
            self.calls += 1

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()
        if self.errors:
            raise self.errors[0]


# A mesh of a joined world is made while another thread communicates over WORLD and makes grids of
# the default world. The other thread keeps using WORLD. Each rank is alone in its joined world, so
# a sum over that world would be a different number.
@pytest.mark.ranks(2)
def test_meshes_of_a_joined_world_leave_world_alone():
    rank = dist.get_rank()
    wrong = 0
    with alone(f"w{rank}") as world, HyperCommGrid("tp=1,dp=1", world=world) as grid:
        grid.create_pgs(["tp", "dp", "tp+dp"])
        with Repeated(lambda: grid.device_mesh(flatten={"all": ["dp", "tp"]})) as meshes:
            for number in range(SUMS):
                total = torch.tensor([number + rank])
                dist.all_reduce(total)
                sizes = HyperCommGrid("dp=-1").size, dist.get_world_size()
                wrong += (int(total), *sizes) != (2 * number + 1, 2, 2)
        assert wrong == 0
        assert meshes.calls > 0


# Neither a mesh of a joined world nor the check for equal meshes needs a default process group.
def test_meshes_of_a_joined_world_without_world():
    with alone("w") as world:
        first, second = (HyperCommGrid("tp=1,dp=1", name=name, world=world) for name in "ab")
        mesh = first.device_mesh(flatten={"all": ["dp", "tp"]})
        position = tuple(mesh.get_coordinate())  # a list before torch 2.13
        assert mesh.get_group("all") is first["tp", "dp"].group
        assert position == (0, 0)
        with pytest.raises(LayoutError, match=r"'dp' of .* has different process groups"):
            second.device_mesh()
        own = torch.tensor([3.0])
        tensor = DTensor.from_local(own, mesh, [Shard(0), Shard(0)], run_check=False)
        assert float(torch.relu(tensor).to_local()) == 3.0


# If ranks have different numbers in a joined world and in WORLD, a mesh uses the numbers of the
# joined world.
@pytest.mark.full
@pytest.mark.ranks(8)
def test_meshes_use_ranks_of_the_joined_world():
    store = dist.distributed_c10d._get_default_store()
    parts = {"engine": 8}
    at = {"name": "w", "parts": parts, "part": "engine", "rank": 7 - dist.get_rank()}
    ranks = np.arange(8).reshape(2, 2, 2)  # the last dim of a mesh varies fastest
    dp, cp, tp = (int(place) for place in np.argwhere(ranks == at["rank"])[0])
    with join_world(store, **at) as world:
        grid = HyperCommGrid("tp=2,cp=2,dp=2", world=world)
        mesh = grid.device_mesh(flatten={"dp_cp": ["dp", "cp"], "cp_tp": ["cp", "tp"]})
        np.testing.assert_array_equal(mesh.mesh.numpy(), ranks)
        assert mesh.get_coordinate() == (dp, cp, tp)
        for name, members in (
            ("dp", ranks[:, cp, tp]),
            ("tp", ranks[dp, cp]),
            ("dp_cp", ranks[:, :, tp]),
            ("cp_tp", ranks[dp]),
        ):
            group = mesh.get_group(name)
            total = torch.tensor([10 ** at["rank"]])
            dist.all_reduce(total, group=group)
            assert int(total) == sum(10 ** int(member) for member in members.ravel())
        with world.as_default():
            np.testing.assert_array_equal(mesh["dp_cp"].mesh.numpy(), ranks[:, :, tp].ravel())
            assert mesh["cp", "tp"]._flatten("cp_tp").get_group() is mesh.get_group("cp_tp")


# ---- as_default ---------------------------------------------------------------------------------


class Blocks:
    """Blocks of as_default() that begin and end in any order, and the default that torch must have.

    Each action is random. Worlds end during blocks, and torch's default process group is destroyed,
    with the groups of all worlds, and initialised again.
    """

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.worlds = []
        self.open_blocks = []
        self.initialised = None
        self.add_worlds()

    def add_worlds(self):
        self.live = [alone(f"w{len(self.worlds) + number}") for number in range(6)]
        self.worlds += self.live

    def enter(self):
        world = self.draw.choice(self.live)
        self.open_blocks.append((world, world.as_default()))
        self.open_blocks[-1][1].__enter__()

    def leave_block(self):
        if self.open_blocks:
            _, block = self.open_blocks.pop(self.draw.randrange(len(self.open_blocks)))
            block.__exit__(None, None, None)

    def end_world(self):
        world = self.draw.choice(self.live)
        if dist.group.WORLD is not world.pg and len(self.live) > 1:
            self.live.remove(world)
            world.leave()

    def replace_default(self):
        if dist.is_initialized():
            dist.destroy_process_group()
            self.initialised = None
            self.add_worlds()
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            self.initialised = dist.group.WORLD

    def expected(self):
        """Return the group of the last block whose world lives, or else what was initialised."""
        shown = [world.pg for world, _ in self.open_blocks if world in self.live]
        return shown[-1] if shown else self.initialised


# Blocks of as_default() may end in any order, as in several threads.
@pytest.mark.parametrize("seed", range(20))
def test_default_of_blocks_in_any_order(seed):
    blocks = Blocks(seed)
    actions = [blocks.enter, blocks.leave_block, blocks.end_world, blocks.replace_default]
    for action in blocks.draw.choices(actions, [4, 4, 3, 1], k=150):
        action()
        assert dist.group.WORLD is blocks.expected()
    while blocks.open_blocks:
        blocks.leave_block()
    assert dist.group.WORLD is blocks.initialised
    for world in blocks.worlds:
        world.leave()
    if blocks.initialised:
        dist.destroy_process_group()


# Each thread can use a different world, but torch has only one default. A call that names a world
# uses that world, whatever torch's default is at that time. Afterwards torch has its first default
# again.
@pytest.mark.ranks(2)
def test_two_worlds_and_one_default():
    rank = dist.get_rank()
    default = dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    parts = {"engine": 2}
    worlds = [
        join_world(store, name=name, parts=parts, part="engine", rank=place)
        for name, place in (("straight", rank), ("reversed", 1 - rank))
    ]
    wrong = []

    def work(world):
        for number in range(8):
            dim = world.name  # equal meshes that exist at the same time would be an error
            with HyperCommGrid({dim: 2}, name=f"{dim}{number}", world=world) as grid:
                group = grid.create_pg(dim)
                own = torch.tensor([world.rank])
                dist.broadcast(own, 0, group=group)  # rank 0 of that world
                position = tuple(grid.device_mesh().get_coordinate())  # a list before torch 2.13
                found = int(own), grid[dim].rank, position, grid[dim].sum(1)
                if found != (0, world.rank, (world.rank,), 2):
                    wrong.append((world.name, number, found))

    def show(world):
        with world.as_default():
            assert dist.is_initialized()

    with Repeated(lambda: show(worlds[0])), Repeated(lambda: show(worlds[1])):
        threads = [threading.Thread(target=work, args=(world,)) for world in worlds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert dist.group.WORLD is default
    total = torch.tensor([rank])
    dist.all_reduce(total)
    assert int(total) == 1
    for world in worlds:
        world.leave()
