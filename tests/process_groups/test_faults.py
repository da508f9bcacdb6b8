"""One rank dies, stops, or comes late: every other one ends in time, with the right words."""

import json
import signal
import socket

import pytest
from busy import late_s
from ranks import fault_ranks, mortal_ranks

from hypercomm.process_groups import creation

HOST = socket.gethostname()
PLACES = ["tp=0, dp=0", "tp=1, dp=0", "tp=0, dp=1", "tp=1, dp=1"]
GRACE_S = late_s(2)
"""How much later than its timeout a rank may end."""


def run_job(folder, fault, victim, number, timeout_s, store_in=None):
    """Run the ranks of a job to their end; what each survivor told, and how each rank ended."""
    codes = mortal_ranks.exit_codes(
        fault_ranks.take_part,
        fault_ranks.WORLD_SIZE,
        *(str(folder), fault, victim, number, timeout_s),
        server=None if store_in is None else (store_in, folder / "port"),
        stopped=[victim] if number == signal.SIGSTOP else [],
    )
    told = {
        rank: json.loads((folder / f"{rank}.json").read_text())
        for rank in range(fault_ranks.WORLD_SIZE)
        if (folder / f"{rank}.json").exists()
    }
    return told, dict(enumerate(codes))


def run_to_the_end(folder, fault, victim, number, timeout_s, store_in=None):
    """Run a job whose victim ends by SIGKILL, and all others by themselves; what those told."""
    told, codes = run_job(folder, fault, victim, number, timeout_s, store_in)
    show(fault, number, told)
    assert codes.pop(victim) == -signal.SIGKILL
    assert set(codes.values()) == {0}
    return told


def show(fault, number, told):
    """Print the figure: how long each survivor waited for its answer."""
    waits = ", ".join(f"rank {rank} {answers[0][1]:.2f} s" for rank, answers in told.items())
    print(f"\n{fault} {signal.Signals(number).name if number else ''}: {waits}", end="")


# A rank that is killed or stopped before it comes to a creation: every other rank names it within
# the timeout and two seconds, and has nothing left.
@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_never_comes(tmp_path, number, victim, timeout_s):
    timeout_s *= 2  # a machine that stands still for a second makes others late, too
    told = run_to_the_end(tmp_path, "before", victim, number, timeout_s)
    for rank in set(range(fault_ranks.WORLD_SIZE)) - {victim}:
        (said, waited), (left, _), (destroyed, took), (after, _) = told[rank]
        assert said.startswith("GroupCreationTimeout: the process group over tp+dp of ranks "), said
        assert f"rank {victim} ({PLACES[victim]}; host {HOST}) did not come" in said
        assert waited < timeout_s + GRACE_S
        assert (left, destroyed, after) == ("0 more, 0 in the grid", "None", "0 more")
        assert took < late_s(1)


# A rank that is killed or stopped while it connects: those that it has not connected to name it in
# time, and have nothing left; for the others, the next collective ends in time.
@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_does_not_connect(tmp_path, number, victim):
    timeout_s = 3.0  # in less, the others may not have heard of each other
    told = run_to_the_end(tmp_path, "during", victim, number, timeout_s)
    for rank in set(range(fault_ranks.WORLD_SIZE)) - {victim}:
        (said, waited), (left, _), *used, (destroyed, took), (after, _) = told[rank]
        assert waited < timeout_s + GRACE_S
        if said == "True":
            ((failed, waited),) = used
            assert failed.startswith("RuntimeError: ")
            assert waited < timeout_s + GRACE_S
        else:
            assert said.startswith("GroupCreationTimeout: the process group over tp+dp of ranks ")
            assert f"rank {victim} ({PLACES[victim]}; host {HOST}) did not connect" in said
            assert (left, used) == ("0 more, 0 in the grid", [])
        assert (destroyed, after) == ("None", "0 more")
        assert took < creation.PATIENCE_S + late_s(1)


# A rank that is killed or stopped after the creation: the next collective of the others ends with
# an error within the timeout, and destroying the grid neither hangs nor leaves anything.
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_afterwards(tmp_path, number, timeout_s):
    told = run_to_the_end(tmp_path, "after", 2, number, timeout_s)
    for rank in (0, 1, 3):
        (said, _), (left, _), (second, waited), (destroyed, took), (after, _) = told[rank]
        assert (said, left) == ("True", "1 more, 1 in the grid")
        assert second.split(":")[0] in {"RuntimeError", "DistBackendError", "DistNetworkError"}
        assert waited < timeout_s + GRACE_S
        assert (destroyed, after) == ("None", "0 more")
        assert took < timeout_s + GRACE_S


# Rank 0, whose process serves the store, is killed while the others wait for it: they say so.
def test_the_store_dies(tmp_path, timeout_s):
    told = run_to_the_end(tmp_path, "store", 0, signal.SIGKILL, timeout_s, store_in=0)
    for rank in (1, 2, 3):
        (said, waited), (left, _), (destroyed, took), (after, _) = told[rank]
        assert said.startswith("CreationError: the process group over tp+dp of ranks "), said
        assert "the job's store is gone, and with it, as a rule, rank 0" in said
        assert waited < timeout_s + GRACE_S
        assert (left, destroyed, after) == ("0 more, 0 in the grid", "None", "0 more")
        assert took < late_s(1)


# A rank that is late by half of the timeout is waited for.
@pytest.mark.long
def test_a_late_rank(tmp_path):
    told, codes = run_job(tmp_path, "late", 2, 0, 3.0)
    show("late", 0, told)
    assert set(codes.values()) == {0}
    for answers in told.values():
        assert [said for said, _ in answers] == [
            "True",
            "1 more, 1 in the grid",
            "1111",
            "None",
            "0 more",
        ]
