"""Test that errors of ranks show the cause first, and what the other ranks did."""

import collections
import re
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from planted_mistakes import STEPS, draw_programs, program
from time_limits import startup_timeout_s

from hypercomm import HyperCommGrid
from hypercomm.errors import CreationError, RankFailedError, time_of
from hypercomm.launch import run_ranks
from hypercomm.testing import fake_world, simulate

SEED = 7


def expected(size, kind, how, odd, at):
    """Return what the error must show before anything else."""
    failed = rf"rank {odd} failed: "
    is_called = how in ("plain", "with")
    # If two ranks wait at different places, either may be the one that skipped a call.
    before = "" if size > 2 else r"(rank .*\n(  File .*\n)+)?"
    return {
        "raise": failed + "ValueError: planted\n",
        "exit": failed + ("SystemExit: planted" if is_called else ".* ended with exit code 7"),
        "kill": failed + r"killed by signal 9 \(SIGKILL\)",
        "hang": rf"{failed}it had not .*\n(ranks? .* had returned\n)?rank {odd} [\s\S]*? in act\n",
        # gloo aborts a rank that receives too much
        "shape": rf"rank \d failed: ((?!reduce_)[\s\S])*{STEPS[at].__name__}\b",
        "skip": rf"rank \d failed: .*\n(rank {odd} had returned\n|{before}rank {odd} waited in)",
        "unpicklable": failed + "it returned a _thread.lock that cannot be pickled",
    }[kind]


# The cause is the first thing that the error shows, whatever the mistake is and wherever a rank
# makes it.
@pytest.mark.parametrize(
    ("count", "more_s"), [(7, 1), pytest.param(24, 10, marks=pytest.mark.slow)]
)
def test_cause_of_a_random_program_is_shown_first(count, more_s, capfd):
    timeout = startup_timeout_s(6) + more_s
    wrong = []
    counts = collections.Counter()
    for size, planted in draw_programs(SEED, count):
        with pytest.raises(RankFailedError) as caught:
            run_ranks(program, size, args=planted, timeout=timeout)
        text = str(caught.value)
        is_right = re.match(expected(size, *planted), text) is not None
        counts[planted[0], is_right] += 1
        if not is_right:
            wrong.append(f"{size} ranks, {planted}:\n{text}")
    capfd.readouterr()
    print(f"seed {SEED}: {dict(counts)}")
    assert not wrong, "\n\n".join(wrong)


# Errors of several ranks are shown once each, in the order of their times. A rank that raises in
# the `with` block of a grid has the time of the error, although it destroys the grid first.
def test_each_error_is_shown_once(monkeypatch):
    def body():
        rank = dist.get_rank()
        dist.barrier()
        if rank == 0:
            with HyperCommGrid("tp=5") as grid:
                monkeypatch.setattr(grid, "destroy", lambda: time.sleep(0.2))
                raise ValueError("first")
        if rank < 3:
            time.sleep(0.1)
            raise KeyError(f"of {rank}")
        if rank == 3:
            dist.barrier()

    with pytest.raises(RankFailedError) as caught:
        run_ranks(body, 5)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("rank")]
    assert lines[0] == "rank 0 failed: ValueError: first"
    assert re.fullmatch("ranks 1..2 failed later: KeyError: 'of [12]'", lines[1])
    assert lines[2] == "rank 4 had returned"
    assert lines[3].startswith("rank 3 waited in barrier at ")
    assert len(lines) == 4


# If all errors are timeouts of collectives, the cause is the rank that does not wait for others.
def test_rank_that_others_wait_for_is_named(monkeypatch):
    monkeypatch.setattr("hypercomm.launch.run._LONG_GRACE_S", 1.5)

    def body():
        if dist.get_rank() == 1:
            time.sleep(600)
        dist.barrier()

    with pytest.raises(RankFailedError) as caught:
        run_ranks(body, 3, group_timeout=timedelta(seconds=1))
    text = str(caught.value)
    assert text.startswith("rank 1 failed: it had not returned when other ranks failed\nrank 1 ran")
    assert re.search(r"\nranks 0, 2 failed as a consequence: RuntimeError: .*$", text)


# The time of an error is the time of the first call.
def test_time_of_an_error():
    begun = time.monotonic()
    error = ValueError()
    first = time_of(error)
    assert begun <= first <= time.monotonic()
    assert time_of(error) == first


# simulate() says which ranks had run.
def test_error_of_a_simulated_rank():
    with pytest.raises(RankFailedError) as caught:
        simulate(lambda: 1 // (dist.get_rank() - 2), 8)
    assert caught.value.rank == 2
    assert caught.value.reason.splitlines()[1].split(", ")[0] == f'  File "{__file__}"'
    assert caught.value.others == "ranks 0..1 had returned\nranks 3..7 had not run yet"


# The error of a first access to a group does not show that the group was looked up before.
def test_error_of_a_first_access_has_no_context():
    with fake_world(2), pytest.raises(CreationError) as caught:
        HyperCommGrid("tp=2", creation="split")["tp"].sum(1)
    assert caught.value.__context__ is None
