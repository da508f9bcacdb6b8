"""Two worlds in threads of one process: each call uses the one that it names."""

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from hypercomm import HyperCommGrid, join_world
from hypercomm.errors import LayoutError

ALONE = {"parts": {"engine": 1}, "part": "engine", "rank": 0}
SUMS = 200


def alone(name):
    """Return a world that has only the calling rank."""
    return join_world(dist.HashStore(), name=name, **ALONE)


class Repeated:
    """Calls a function in another thread, again and again, within a `with` block."""

    def __init__(self, function):
        self.calls, self.errors, self._is_over = 0, [], threading.Event()
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


# A mesh of a joined world is made while another thread communicates over WORLD, and makes grids of
# the default world: both use WORLD. As each rank is alone in the joined world, a sum over that is
# another number.
@pytest.mark.ranks(2)
def test_meshes_of_a_joined_world_leave_world_alone():
    rank, wrong = dist.get_rank(), 0
    with alone(f"w{rank}") as world, HyperCommGrid("tp=1,dp=1", world=world) as grid:
        grid.create_pgs(["tp", "dp", "tp+dp"])
        with Repeated(lambda: grid.device_mesh(flatten={"all": ["dp", "tp"]})) as meshes:
            for number in range(SUMS):
                total = torch.tensor([number + rank])
                dist.all_reduce(total)
                sizes = HyperCommGrid("dp=-1").size, dist.get_world_size()
                wrong += (int(total), *sizes) != (2 * number + 1, 2, 2)
        assert (wrong, meshes.calls > 0) == (0, True)


# A mesh of a joined world needs no default process group, and neither does the check for equal
# meshes.
def test_meshes_of_a_joined_world_without_world():
    with alone("w") as world:
        first, second = (HyperCommGrid("tp=1,dp=1", name=name, world=world) for name in "ab")
        mesh = first.device_mesh(flatten={"all": ["dp", "tp"]})
        assert (mesh.get_group("all"), mesh.get_coordinate()) == (first["tp", "dp"].group, (0, 0))
        with pytest.raises(LayoutError, match=r"'dp' of .* has other groups"):
            second.device_mesh()
        own = torch.tensor([3.0])
        tensor = DTensor.from_local(own, mesh, [Shard(0), Shard(0)], run_check=False)
        assert float(torch.relu(tensor).to_local()) == 3.0


# The ranks of a joined world have other numbers than those of WORLD: meshes have those of the
# joined world.
@pytest.mark.full
@pytest.mark.ranks(8)
def test_meshes_of_a_world_with_other_numbers():
    store, parts = dist.distributed_c10d._get_default_store(), {"engine": 8}
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
            group, total = mesh.get_group(name), torch.tensor([10 ** at["rank"]])
            dist.all_reduce(total, group=group)
            assert int(total) == sum(10 ** int(member) for member in members.ravel())
        with world.as_default():
            np.testing.assert_array_equal(mesh["dp_cp"].mesh.numpy(), ranks[:, :, tp].ravel())
            assert mesh["cp", "tp"]._flatten("cp_tp").get_group() is mesh.get_group("cp_tp")
