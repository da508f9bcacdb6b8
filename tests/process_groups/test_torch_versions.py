"""Test that groups are created in spite of differences between releases of torch.

If the installed torch lacks a difference, a replacement behaves like a torch that has it.
"""

import os
import time
import warnings
from datetime import timedelta

import bound_world
import forked_programs
import pytest
import torch
import torch.distributed as dist
from group_checks import sum_over
from time_limits import scaled_s

from hypercomm import HyperCommGrid
from hypercomm.errors import CreationError
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.testing import fake_world

VERSION = torch.torch_version.TorchVersion(torch.__version__)


# If gloo cannot be set up on one rank, its error gives the reason. The other rank waits inside
# torch until its timeout. Both errors say that all ranks had arrived. Afterwards, groups can be
# created.
@pytest.mark.ranks(2)
def test_failed_gloo_setup_is_reported():
    grid = HyperCommGrid([2], ["dp"])
    if dist.get_rank() == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    begin = time.monotonic()
    reason = "nosuch0" if dist.get_rank() else "although all of its ranks had arrived"
    with pytest.raises(CreationError, match=reason):
        grid.create_pg("dp", timeout=timedelta(seconds=1))
    assert time.monotonic() - begin < scaled_s(10)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    dist.barrier()
    with grid:
        assert sum_over(grid.create_pg("dp")) == 11


# On a rank outside a split, torch before 2.14 returns None, and newer releases return a number.
# hypercomm returns None.
@pytest.mark.parametrize("outside", [None, dist.GroupMember.NON_GROUP_MEMBER])
def test_rank_outside_a_split_gets_none(monkeypatch, outside):
    bound_world.bind(monkeypatch)
    monkeypatch.setattr(dist, "split_group", lambda **_: outside)
    with (
        fake_world(5, rank=4),
        HyperCommGrid([2, 2], ["tp", "dp"], creation="split", cover="any") as grid,
    ):
        assert grid.create_pg("tp") is None


# The timeout of a group can be changed, without a warning from torch.
@pytest.mark.skipif(VERSION < "2.13", reason="gloo may keep its first timeout")
@pytest.mark.ranks(2)
def test_set_timeout():
    with HyperCommGrid([2], ["dp"]) as grid:
        group = grid.create_pg("dp")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torchdist.set_timeout(timedelta(seconds=0.5), group)
        if dist.get_rank() == 0:
            begin = time.monotonic()
            with pytest.raises(RuntimeError):
                sum_over(group)
            assert 0.4 < time.monotonic() - begin < scaled_s(5)
        dist.barrier()


# Without torch's private function that creates one group, hypercomm warns, and each rank creates
# all groups.
def test_torch_without_private_helper():
    done = forked_programs.run(WITHOUT_HELPER)
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
        del sys.modules[loaded]  # the import checks for the name

logging.basicConfig()
torchs = dist.distributed_c10d
real_helper = torchs._new_process_group_helper
torchs._new_process_group_helper = lambda *given, **named: real_helper(*given, **named)
from hypercomm import HyperCommGrid
from hypercomm.errors import CreationError, GroupOptionsError
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with HyperCommGrid([1], ["dp"]) as grid:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=grid.create_pg("dp"))
    assert tensor.item() == 1
    print(grid.explain("dp").strategy)
dist.destroy_process_group()
"""


# With torch before 2.10, the library and the command line raise an error with its version and the
# fix. Layouts still work.
@pytest.mark.full
def test_too_old_torch_is_reported():
    older = "2.9.1"
    message = (
        f"torch {older} is installed, and hypercomm needs 2.10 or newer: pip install "
        "'torch>=2.10'; hypercomm.layout and hypercomm.RankLayout work without torch"
    )
    # The library is loaded again: its first import reads the version.
    begin = (
        f"import sys, torch; torch.__version__ = {older!r}\n"
        f"for name in [*sys.modules]:\n"
        f"    if name.partition('.')[0] == 'hypercomm':\n"
        f"        del sys.modules[name]\n"
    )
    use = "from hypercomm import RankLayout; RankLayout('tp=2'); print('planned')\n"
    for then, expected in (
        ("import hypercomm.grid", f"hypercomm.errors.MissingPackageError: {message}"),
        ("from hypercomm.cli import main; raise SystemExit(main(['doctor']))", message),
    ):
        done = forked_programs.run(begin + use + then)
        assert done.stdout.startswith("planned\n")
        assert done.returncode in {1, 2}
        assert expected in " ".join((done.stderr + done.stdout).split())


# With TorchComms, the strategy is "local" from torch 2.14 on. Older releases need all ranks, so the
# strategy is "enumerate".
def test_groups_through_torchcomms(monkeypatch):
    for name in ("_use_torchcomms_enabled", "_torchcomms_handles_backend"):
        monkeypatch.setattr(dist.distributed_c10d, name, lambda *_: True, raising=False)
    with fake_world(3), HyperCommGrid([2], ["dp"], cover="any") as grid:
        assert grid.explain("dp").strategy == ("local" if VERSION >= "2.14" else "enumerate")
