"""What torch changed, and may change: groups are created all the same.

Where the torch at hand does not show a change itself, a stand-in has its new answers.
"""

import itertools
import json
import signal
import sys
from datetime import timedelta

import bound_world
import fresh_programs
import pytest
import torch
import torch.distributed as dist
from ranks import version_ranks
from ranks.mortal_ranks import exit_codes

from hypercomm import HyperCommGrid
from hypercomm.errors import GroupOptionsError, LayoutError
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.torch_internals.capabilities import check_release, release_of
from hypercomm.process_groups.torch_internals.gloo import host_in
from hypercomm.testing import fake_world, run_ranks

VERSION = torch.torch_version.TorchVersion(torch.__version__)
IS_PLUGIN = VERSION >= "2.14"

needs_entry_points = pytest.mark.skipif(not IS_PLUGIN, reason="it came with torch 2.14")


SUMS = {0: [11, 101], 1: [11, 1010], 2: [1100, 101], 3: [1100, 1010]}


# The host in a gloo address: the length of its name in 8 bytes, and the name, be it of one letter.
@pytest.mark.parametrize(
    ("address", "host"),
    [
        (b"node-17.local", "node-17.local"),
        (b"n", "n"),
        (b"", None),
        (b"a\0b", None),
        (b"n" * 255, "n" * 255),
        (b"n" * 5000, None),
    ],
)
def test_host_in_an_address(address, host):
    length = len(address).to_bytes(8, sys.byteorder)
    assert host_in(length + address + b"port and more") == host
    assert host_in(length + address[:-1]) is None
    assert host_in(None) is host_in(length) is None


# A creation that fails for another reason says what it is, and nothing about torch; who waits for
# this rank hears the same, long before the timeout; afterwards groups are created in our way, as if
# nothing had been.
def test_a_trial_that_fails():
    got = run_ranks(version_ranks.a_trial_that_fails, 2, timeout=60)
    (heard, waited, *other), (said, _, *own) = got
    for words in (heard, said):
        assert words.startswith("CreationError: ")
        assert "nosuch0" in words
    assert waited < 15
    assert own == other == [11]


# gloo leaves options aside, so they are refused, also where torch calls gloo a plugin (2.14).
def test_gloo_options_are_refused():
    for said, is_clean, left in run_ranks(version_ranks.refused_options, 2):
        assert len(said) == 3
        for line in said:
            assert line.startswith("GroupOptionsError: pg_options ")
            assert "would be dropped: torch passes no options to backend 'gloo'" in line
        assert is_clean
        assert left == {}


# Who takes options, by what torch's creators do with them: NCCL in all its forms, and a third
# party's backend if it says so; none of torch's others.
def test_who_takes_options(monkeypatch):
    plugin = dist.Backend._BackendPlugin
    for name, extended in (("THEIRS", True), ("SIMPLE", False), ("NCCL-MINE", False)):
        monkeypatch.setitem(
            dist.Backend._plugins, name, plugin(lambda *_: None, extended_api=extended)
        )
    nccl = ["nccl", "nccl2", "nccl-lazy", "nccl-legacy"]
    others = ["gloo", "ucc", "mpi", "xccl", "simple", "nccl-mine", "unknown"]
    takes = {name: c10d.takes_options(name) for name in (*nccl, "theirs", *others)}
    assert [name for name, it_does in takes.items() if it_does] == [*nccl, "theirs"]


# A rank outside a split is told None, or since torch 2.14 a number; to our users it is None, and
# it never takes the place of the member's own group, however many turns there are.
@pytest.mark.parametrize("outside", [None, dist.GroupMember.NON_GROUP_MEMBER])
@pytest.mark.parametrize("own_turn", [0, 1, None])
def test_who_is_outside_a_split(monkeypatch, outside, own_turn):
    colors = itertools.repeat(1) if own_turn is not None else itertools.count()
    rank = {0: 0, 1: 2, None: 4}[own_turn]
    bound_world.bind(monkeypatch)
    monkeypatch.setattr(c10d, "split_colors", lambda _groups: [next(colors) for _ in range(2)])
    with fake_world(5, rank), HyperCommGrid([2, 2], ["tp", "dp"], creation="split") as grid:
        made = []

        def split_group(split_ranks, **_):
            if rank not in split_ranks[0]:
                return outside
            made.append(dist.new_group(split_ranks[0]))
            return made[-1]

        monkeypatch.setattr(dist, "split_group", split_group)
        group = grid.create_pg("tp")
        if own_turn is None:
            assert (group, made) == (None, [])
        else:
            assert [group] == made
            assert dist.get_process_group_ranks(group) == [rank, rank + 1]


# The timeout of a group can be changed, without a warning of torch's ...
@pytest.mark.skipif(
    VERSION < "2.13",
    reason="gloo may keep its first timeout",
)
def test_the_timeout_of_a_group():
    waited, _ = run_ranks(version_ranks.another_timeout, 2, timeout=60)
    assert 0.4 < waited < 5


# ... by torch's public function where there is one, and by its private one where there is not.
@pytest.mark.parametrize("is_public", [True, False])
def test_who_changes_the_timeout(monkeypatch, is_public):
    called, torchs = [], dist if is_public else dist.distributed_c10d
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    name = "set_timeout" if is_public else "_set_pg_timeout"
    monkeypatch.setattr(
        torchs, name, lambda timeout, group: called.append((timeout, group)), raising=False
    )
    c10d.set_timeout(timedelta(seconds=5), None)
    assert called == [(timedelta(seconds=5), None)]


# ---- backends -----------------------------------------------------------------------------------


# A third party's backend that its package names in an entry point (torch 2.14) is known before
# anybody has loaded it, and its groups communicate; one that cannot be loaded says why.
@needs_entry_points
def test_a_backend_of_an_entry_point(tmp_path):
    version_ranks.write_package(tmp_path)
    for said, known, total in run_ranks(version_ranks.a_third_party, 2, args=(str(tmp_path),)):
        assert total == 11
        assert {"theirs", "broken", "nccl-lazy", "nccl2"} <= set(known)
        assert "backend 'broken' cannot be loaded (No module named 'nowhere')" in said
        assert "; use one of ['gloo'" in said


# An older torch has no such entry points, and a backend of a newer one is refused with what to do.
@pytest.mark.skipif(IS_PLUGIN, reason="torch 2.14 and newer have them")
def test_backends_of_a_newer_torch():
    assert "nccl-lazy" not in c10d.known_backends()
    with fake_world(4), HyperCommGrid([4], ["dp"]) as grid:
        with pytest.raises(
            GroupOptionsError, match=r"unknown backend 'nccl-lazy'; this torch knows"
        ):
            grid.create_pg("dp", backend="nccl-lazy")
        with pytest.raises(
            GroupOptionsError, match=r"to have 'nccl2', install torch 2\.14 or newer"
        ):
            grid.create_pg("dp", backend="cuda:nccl2")


# A newer torch has them, whether there is a GPU or not: one can plan with them in a fake world.
@needs_entry_points
def test_backends_of_this_torch():
    with fake_world(4), HyperCommGrid([4], ["dp"]) as grid:
        for number, backend in enumerate(["nccl-lazy", "nccl2", "cpu:gloo,cuda:nccl2"]):
            assert grid.create_pg("dp", name=str(number), backend=backend).size() == 4


# ---- what newer releases can --------------------------------------------------------------------


# A gloo job that can be reconfigured (torch 2.14) goes on after a death: the survivors abort their
# grid, reconfigure WORLD, and a new grid of theirs works.
@needs_entry_points
def test_a_reconfigured_world(tmp_path):
    codes = exit_codes(version_ranks.survive, 3, str(tmp_path))
    assert codes == [0, 0, -signal.SIGKILL]
    for rank in range(2):
        before, world_size, after = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (before, world_size, after) == (111, 2, 11)


# A DeviceMesh that keeps the order of its ranks (torch 2.15) is read as a grid, and a grid over
# listed ranks gives one; slices keep it. DTensors are sharded by that order.
@pytest.mark.skipif(VERSION < "2.15", reason="preserve_rank_order= came with torch 2.15")
def test_meshes_keep_their_order():
    ranks = [[1, 0], [3, 2]]
    for own, grids, shards, given in run_ranks(version_ranks.permuted_meshes, 4, args=(ranks,)):
        assert grids == [[1, 0, 3, 2], [[1, 0], [3, 2]], [[1, 3], [0, 2]]]
        assert shards == [1.0, 0.0] if own < 2 else [3.0, 2.0]
        assert given == [True, True, [ranks[own // 2]]]


# Where torch sorts, a permuted mesh is refused, with what would do.
def test_meshes_that_torch_sorts():
    with fake_world(4):
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("dp", "tp"))
        with pytest.raises(LayoutError, match=r"or preserve_rank_order=True \(torch 2\.15\)"):
            HyperCommGrid.from_device_mesh(mesh)


# What NVIDIA's containers have is a release, though it says "a0": nobody is refused for that.
def test_releases():
    assert release_of("2.10.0a0+ecf3bae40a.nv25.12") == release_of("2.10") < release_of("2.15.1")
    check_release("2.10.0a0+ecf3bae40a.nv25.12")


# A torch older than 2.10 is refused with its version and what to do, by the library and the command
# line; layouts work with it all the same.
@pytest.mark.long
@pytest.mark.parametrize("older", ["2.9.1", "1.13.0+cu117"])
def test_a_torch_that_is_too_old(older):
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
        ("import hypercomm.grid", f"hypercomm.errors.TorchVersionError: {said}"),
        ("from hypercomm.cli import main; raise SystemExit(main(['doctor']))", said),
    ):
        done = fresh_programs.run(begin + use + then)
        assert done.stdout.startswith("planned\n")
        assert done.returncode in {1, 2}
        assert told in " ".join((done.stderr + done.stdout).split())
