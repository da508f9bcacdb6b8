"""What torch changed, and may change: groups are created all the same.

Where the torch at hand does not show a change itself, a stand-in has its new answers.
"""

import json
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from unittest import mock

import bound_world
import fresh_programs
import pytest
import torch
import torch.distributed as dist
from group_facts import registered, sum_over
from mortal_ranks import exit_codes
from torch.distributed import ProcessGroupGloo as Gloo

from hypercomm import HyperCommGrid
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.testing import fake_world, run_ranks

VERSION = torch.torch_version.TorchVersion(torch.__version__)
IS_PLUGIN = VERSION >= "2.14"
needs_entry_points = pytest.mark.skipif(not IS_PLUGIN, reason="it came with torch 2.14")


def a_trial_that_fails():
    """The first creation of rank 1 fails for a reason of its own; the second does not."""
    grid, said = HyperCommGrid([2], ["dp"]), None
    if dist.get_rank() == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    begin = time.monotonic()
    try:
        grid.create_pg("dp", timeout=timedelta(seconds=30))
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    waited = time.monotonic() - begin
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    dist.barrier()
    with grid:
        return said, waited, sum_over(grid.create_pg("dp"))


# A creation that fails for another reason says what it is, and nothing about torch; who waits for
# this rank hears the same, long before the timeout; afterwards groups are created in our way, as if
# nothing had been.
def test_a_trial_that_fails():
    got = run_ranks(a_trial_that_fails, 2, timeout=60)
    (heard, waited, *other), (said, _, *own) = got
    for words in (heard, said):
        assert words.startswith("CreationError: ")
        assert "nosuch0" in words
    assert waited < 15
    assert own == other == [11]


def refused_options():
    """Options that gloo would leave aside, and what is left after they were refused."""
    before, said = registered(), []
    grid = HyperCommGrid([2], ["dp"])
    for options in (Gloo._Options(), object(), 7):
        try:
            grid.create_pg("dp", pg_options=options)
        except ValueError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said, registered() == before, dict(grid.pgs)


# gloo leaves options aside, so they are refused, also where torch calls gloo a plugin (2.14).
def test_gloo_options_are_refused():
    for said, is_clean, left in run_ranks(refused_options, 2):
        assert len(said) == 3
        for line in said:
            assert line.startswith("GroupOptionsError: pg_options ")
            assert "would be dropped: torch passes no options to backend 'gloo'" in line
        assert is_clean
        assert left == {}


# A rank outside a split gets None from torch, or since torch 2.14 a number; users get None.
@pytest.mark.parametrize("outside", [None, dist.GroupMember.NON_GROUP_MEMBER])
def test_a_rank_outside_a_split(monkeypatch, outside):
    bound_world.bind(monkeypatch)
    monkeypatch.setattr(dist, "split_group", lambda **_: outside)
    with (
        fake_world(5, rank=4),
        HyperCommGrid([2, 2], ["tp", "dp"], creation="split", cover="any") as grid,
    ):
        assert grid.create_pg("tp") is None


def another_timeout():
    """How long rank 0 waits for rank 1 once the timeout of their group is another."""
    grid = HyperCommGrid([2], ["dp"])
    group, waited = grid.create_pg("dp"), None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        c10d.set_timeout(timedelta(seconds=0.5), group)
    if dist.get_rank() == 0:
        begin = time.monotonic()
        try:
            sum_over(group)
        except RuntimeError:
            waited = time.monotonic() - begin
    dist.barrier()
    grid.destroy()
    return waited


# The timeout of a group can be changed, without a warning of torch.
@pytest.mark.skipif(
    VERSION < "2.13",
    reason="gloo may keep its first timeout",
)
def test_the_timeout_of_a_group():
    waited, _ = run_ranks(another_timeout, 2, timeout=60)
    assert 0.4 < waited < 5


# Without the private function that creates one group, there is a warning, and groups are right.
def test_a_torch_without_the_helper():
    done = fresh_programs.run(WITHOUT_HELPER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("enumerate\n")
    assert "lacks the private name _new_process_group_helper" in done.stderr


WITHOUT_HELPER = """
import logging
import sys
import torch
import torch.distributed as dist

for loaded in [*sys.modules]:
    if loaded.partition(".")[0] == "hypercomm":
        del sys.modules[loaded]  # its first import looks for the name

logging.basicConfig()
torchs = dist.distributed_c10d
honest = torchs._new_process_group_helper
torchs._new_process_group_helper = lambda *given, **named: honest(*given, **named)
from hypercomm import HyperCommGrid
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with HyperCommGrid([1], ["dp"]) as grid:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=grid.create_pg("dp"))
    assert tensor.item() == 1
    print(grid.explain("dp").strategy)
dist.destroy_process_group()
"""


# A torch older than 2.10 is refused with its version and what to do, by the library and the command
# line; layouts work with it all the same.
@pytest.mark.full
def test_a_torch_that_is_too_old():
    older = "2.9.1"
    said = (
        f"torch {older} is installed, and hypercomm needs 2.10 or newer: pip install "
        "'torch>=2.10'; hypercomm.layout, and hypercomm.RankLayout, need none"
    )
    # The library is loaded anew: its first import looks at the version.
    begin = (
        f"import sys, torch; torch.__version__ = {older!r}\n"
        f"for name in [*sys.modules]:\n"
        f"    if name.partition('.')[0] == 'hypercomm':\n"
        f"        del sys.modules[name]\n"
    )
    use = "from hypercomm import RankLayout; RankLayout.parse('tp=2'); print('planned')\n"
    for then, told in (
        ("import hypercomm.grid", f"hypercomm.errors.MissingPackageError: {said}"),
        ("from hypercomm.cli import main; raise SystemExit(main(['doctor']))", said),
    ):
        done = fresh_programs.run(begin + use + then)
        assert done.stdout.startswith("planned\n")
        assert done.returncode in {1, 2}
        assert told in " ".join((done.stderr + done.stdout).split())


# ---- torch 2.14 ---------------------------------------------------------------------------------


# Through TorchComms torch 2.14 creates a group with its members only, as "local" does; an older
# torch splits WORLD. A stand-in of its names shows which ranks take part.
def test_groups_through_torchcomms():
    alone = ("local", [(0, 2), 11]), ("local", [(1, 2), 11]), ("local", [])
    split = ("enumerate", []), ("enumerate", []), ("enumerate", [])
    assert tuple(run_ranks(through_torchcomms, 3, timeout=60)) == (alone if IS_PLUGIN else split)


def through_torchcomms():
    found = []

    def new_comm(_backend, _device, *, store, **_):
        place = int(os.environ["TORCHCOMM_RANK"]), int(os.environ["TORCHCOMM_SIZE"])
        found.append(place)
        return dist.ProcessGroupGloo(store, *place, timeout=timedelta(seconds=30))

    stand_in = {
        "_use_torchcomms_enabled": lambda: True,
        "_torchcomms_handles_backend": lambda _: True,
        "new_comm": new_comm,
        "FlightRecorderHook": mock.MagicMock(),
        "_BackendWrapper": lambda comm: comm,
    }
    grid = HyperCommGrid([2], ["dp"], cover="any")
    with mock.patch.multiple(dist.distributed_c10d, create=True, **stand_in):
        strategy = grid.explain("dp").strategy
        if strategy == "local" and dist.get_rank() < 2:
            found.append(sum_over(grid.create_pg("dp")))
    grid.destroy()
    return strategy, found


PACKAGE = """
import torch.distributed as dist

def create(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

def register():
    dist.Backend.register_backend("theirs", create, devices=["cpu"])
"""
ENTRY_POINTS = """[torch.distributed.backends]
theirs = theirs_of_the_test:register
broken = nowhere:register
"""


def write_package(folder):
    """Install a third party's backend into a folder."""
    (folder / "theirs_of_the_test.py").write_text(PACKAGE)
    info = folder / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


def a_third_party(folder):
    """Create a group of a third party's backend."""
    sys.path.insert(0, folder)
    with HyperCommGrid([2], ["dp"]) as grid:
        try:
            said = str(grid.create_pg("dp", backend="broken"))
        except ValueError as error:
            said = str(error)
        total = sum_over(grid.create_pg("dp", backend="theirs"))
        return said, c10d.known_backends(), total


def survive(rank, port, folder):
    """Lose rank 2, and go on without it."""
    torchs = dist.distributed_c10d
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, enable_reconfigure=True)

    def reconfigure(attempt, ranks):
        store.set(f"{attempt}/{rank}", torchs._get_reconfigure_handle())
        handles = [store.get(f"{attempt}/{member}").decode() for member in ranks]
        torchs._reconfigure(uuid=attempt, handles=handles).wait()

    reconfigure(1, [0, 1, 2])
    grid = HyperCommGrid([3], ["dp"])
    before = sum_over(grid.create_pg("dp"))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    grid.abort()
    reconfigure(2, [0, 1])
    smaller = HyperCommGrid([2], ["dp"])
    after = sum_over(smaller.create_pg("dp"))
    told = [before, dist.get_world_size(), after]
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    os._exit(0)  # WORLD has lost a rank: nobody waits for it


# A third party's backend that its package names in an entry point (torch 2.14) is known before
# anybody has loaded it, and its groups communicate; one that cannot be loaded says why.
@needs_entry_points
def test_a_backend_of_an_entry_point(tmp_path):
    write_package(tmp_path)
    for said, known, total in run_ranks(a_third_party, 2, args=(str(tmp_path),)):
        assert total == 11
        assert {"theirs", "broken", "nccl-lazy", "nccl2"} <= set(known)
        assert "backend 'broken' cannot be loaded (No module named 'nowhere')" in said
        assert "; use one of ['gloo'" in said


# One can plan with the backends of torch 2.14 in a fake world, whether there is a GPU or not.
@needs_entry_points
def test_backends_of_this_torch():
    with fake_world(4), HyperCommGrid([4], ["dp"]) as grid:
        for number, backend in enumerate(["nccl-lazy", "nccl2", "cpu:gloo,cuda:nccl2"]):
            assert grid.create_pg("dp", name=str(number), backend=backend).size() == 4


# A gloo job that can be reconfigured (torch 2.14) goes on after a death: the survivors abort their
# grid, reconfigure WORLD, and a new grid of theirs works.
@needs_entry_points
def test_a_reconfigured_world(tmp_path):
    codes = exit_codes(survive, 3, str(tmp_path))
    assert codes == [0, 0, -signal.SIGKILL]
    for rank in range(2):
        before, world_size, after = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (before, world_size, after) == (111, 2, 11)
