"""What torch changed, and may change: groups are created all the same.

Where the torch at hand does not show a change itself, a stand-in has its new answers.
"""

import itertools
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import version_ranks

from hypercomm import HyperCommGrid
from hypercomm.process_groups import c10d
from hypercomm.testing import fake_world, run_ranks

SUMS = {0: [11, 101], 1: [11, 1010], 2: [1100, 101], 3: [1100, 1010]}


# torch calls its gloo class with an argument that we have never heard of: it is passed on. Where
# it cannot be said together with ours, torch's way is taken, and the log says so once.
@pytest.mark.parametrize(
    ("kind", "novelties", "is_known"),
    [
        ("WithOption", [7] * 5, True),
        ("Later", [7] * 5, False),
        ("WithoutOptions", [7] * 5, False),
        ("Renamed", [7] * 5, False),
    ],
)
def test_gloo_of_a_later_torch(kind, novelties, is_known):
    got = run_ranks(version_ranks.gloo_of_a_later_torch, 4, args=(kind,), timeout=60)
    for rank, (sums, seen, heard, is_restored) in enumerate(got):
        assert sums == [*SUMS[rank], *SUMS[rank], 1111]
        assert seen == novelties
        assert is_restored
        assert len(heard) == (0 if is_known else 1)
        for line in heard:
            assert line.startswith(f"torch {torch.__version__} creates gloo groups in a way that")


# Also then a rank that does not come is named, after the timeout and no later than two seconds
# after it; and all may try again.
@pytest.mark.parametrize("kind", ["Later", "Renamed"])
def test_a_missing_rank_in_a_later_torch(kind):
    got = run_ranks(version_ranks.a_rank_is_missing, 3, args=(kind,), timeout=60)
    for said, waited, total in got[:2]:
        assert said.startswith(
            "GroupCreationTimeout: the process group over dp of ranks (0, 1, 2) was not created: "
            "rank 2 (dp=2"
        )
        assert 1 <= waited < 1 + 2
        assert total == 111
    assert got[2][2] == 111


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
    for name, extended in (("THEIRS", True), ("SIMPLE", False)):
        monkeypatch.setitem(
            dist.Backend._plugins, name, plugin(lambda *_: None, extended_api=extended)
        )
    takes = {
        name: c10d.takes_options(name)
        for name in ("nccl", "nccl2", "nccl-lazy", "nccl-legacy", "gloo", "ucc", "mpi", "xccl")
    }
    assert takes == {name: name.startswith("nccl") for name in takes}
    assert c10d.takes_options("theirs")
    assert not c10d.takes_options("simple")
    assert not c10d.takes_options("unknown")


# A rank outside a split is told None, or since torch 2.14 a number; to our users it is None, and
# it never takes the place of the member's own group, however many turns there are.
@pytest.mark.parametrize("outside", [None, dist.GroupMember.NON_GROUP_MEMBER])
@pytest.mark.parametrize("own_turn", [0, 1, None])
def test_who_is_outside_a_split(monkeypatch, outside, own_turn):
    colors = itertools.repeat(1) if own_turn is not None else itertools.count()
    rank = {0: 0, 1: 2, None: 4}[own_turn]
    monkeypatch.setattr(c10d, "split_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(c10d, "device_backend", lambda _device: "fake")
    monkeypatch.setattr(c10d, "split_colors", lambda _groups: [next(colors) for _ in range(2)])
    with fake_world(5, rank), HyperCommGrid([2, 2], ["tp", "dp"], world_size=5) as grid:
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


# The timeout of a group is changed by torch's public function where there is one, without a
# warning, and by its private one where there is not.
def test_the_timeout_of_a_group(monkeypatch):
    called = []
    with fake_world(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        for module, name in ((dist, "set_timeout"), (dist.distributed_c10d, "_set_pg_timeout")):
            with monkeypatch.context() as patch:
                if name == "_set_pg_timeout":
                    patch.delattr(dist, "set_timeout", raising=False)
                patch.setattr(
                    module, name, lambda *args, name=name: called.append((name, *args)), False
                )
                c10d.set_timeout(timedelta(seconds=5), None)
    assert called == [
        ("set_timeout", timedelta(seconds=5), None),
        ("_set_pg_timeout", timedelta(seconds=5), None),
    ]
