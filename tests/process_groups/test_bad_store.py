"""A store that holds what somebody else wrote, or answers late: a named error, and in time."""

import ast
import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from simulated_job import StoreIsSlow, attempt, simulate_job
from simulated_job.invariants import GRACE_S, late_calls
from simulated_job.store import Client

import hypercomm
from hypercomm import HyperCommGrid, errors

T = 10.0
ANSWER_S = 60.0
"""How long an answer of the store may take where nothing else says so."""
LONGEST_MESSAGE = 2_000


def program():
    """Keys of every kind are written and read; rank 3 comes to the last verify() by no means."""
    grid = HyperCommGrid([2, 2], ["tp", "dp"], verify=True)
    grid.register_view("e", [1, 4], ["ep", "rest"])
    attempt(grid.create_pgs, [{"dims": ["ep", "rest"], "view": "e"}, "tp"])
    attempt(grid.create_pg, "dp")
    if dist.get_rank() != 3:
        attempt(grid.verify, timedelta(seconds=T))
    return grid


KEYS = {
    "slot": "/grids from 0/0",
    "view": "/view e",
    "turn": "/step 0/0",
    "step": "/step 0",
    "next step": "/step 1",
    "here": "/here/2",
    "whereabouts": "/rank 3",
    "address": "/tp/0//cpu//0/1",
    "connected": "/connected/1",
}
READ = {"slot", "view", "turn", "step", "next step"}
"""Keys whose values are read by all ranks; of marks it counts only whether they are there."""

BAD = {
    "cut off": lambda text: text[: len(text) // 2],
    "no JSON": lambda _: b"{",
    "no text": lambda _: b"\xff\xfe\x00",
    "a list": lambda _: b"[[1], 2]",
    "null": lambda _: b"null",
    "a long number": lambda _: b"9" * 5_000,
    "deep": lambda _: b"[" * 100_000,
    "10 MB": lambda _: b"x" * 10_000_000,
    "10 MB of JSON": lambda _: json.dumps({"first": "x" * 10_000_000, "end": None}).encode(),
    "wrong types": lambda _: b'{"first": {"rank": "0", "host": 1, "entries": [2]}, "end": null}',
    "no end": lambda _: b'{"first": null, "end": {"kind": "over", "ranks": ["a"]}}',
    "endless words": lambda _: json.dumps(
        {"first": None, "end": {"kind": "failed", "words": "x" * 10_000_000}}
    ).encode(),
    "more fields": lambda _: b'{"first": null, "end": {"kind": "agreed", "since": "9.9"}}',
}

LARGE = {"10 MB", "10 MB of JSON", "endless words"}
"""What takes long: by default one key holds it, and another one whose value counts for nothing."""
CASES = [
    pytest.param(
        kind,
        value,
        marks=[pytest.mark.slow] if value in LARGE and kind not in {"step", "here"} else [],
    )
    for kind in KEYS
    for value in BAD
]


def with_bad(monkeypatch, part, bad):
    """Let one key hold something else, as soon as it is written."""
    put, written = Client._put, []

    def spoil(self, values):
        for key, value in values.items():
            if key.endswith(part):
                written.append(key)
                values = {**values, key: bad(value)}
        put(self, values)

    monkeypatch.setattr(Client, "_put", spoil)
    return written


def check_named(run):
    """What was raised has a name of ours, is no longer than one can read, and came in time."""
    assert run.is_stuck is None, run
    for outcome in run.ranks:
        assert outcome.error is None, run
        for call in outcome.calls:
            assert isinstance(call.error, (errors.HyperCommError, type(None))), call
            assert len(str(call.error)) < LONGEST_MESSAGE
    assert late_calls(run, T) == [], run


# Whatever a key comes to hold, each call ends in time with an error of ours or rightly; a key that
# all read is named, and each rank fails.
@pytest.mark.any_torch
@pytest.mark.long
@pytest.mark.parametrize(("kind", "value"), CASES)
def test_bad_values(monkeypatch, kind, value):
    written = with_bad(monkeypatch, KEYS[kind], BAD[value])
    run = simulate_job(program, 4, timeout=timedelta(seconds=T))
    assert written
    check_named(run)
    if kind in READ:
        failed = [[call for call in outcome.calls if not call.is_ok] for outcome in run.ranks]
        assert all(failed[:3]), run
        told = " ".join(str(call.error) for calls in failed for call in calls)
        assert f"the store's key {written[0]!r} holds " in told, run


# Another version of the library on the rank that came first is named on all ranks, with both.
def test_another_version(monkeypatch):
    version = hypercomm.__version__.encode()
    with_bad(monkeypatch, KEYS["slot"], lambda text: text.replace(version, b"0.0.1"))
    run = simulate_job(program, 4, timeout=timedelta(seconds=T))
    check_named(run)
    for call in run.calls(0):
        assert call.kind == "GridMismatchError", run
        assert str(call.error).startswith("hypercomm: ")
        assert " 0.0.1 " in str(call.error)


# A store that answers after its timeout is given up by all ranks, each time, with an error that
# says so.
@pytest.mark.parametrize("from_s", [0.0, 0.003, 0.006])
def test_a_store_that_answers_too_late(from_s):
    fault = StoreIsSlow(from_s, ANSWER_S + 1)
    run = simulate_job(program, 4, timeout=timedelta(seconds=T), faults=[fault])
    assert run.is_stuck is None, run
    calls = [call for outcome in run.ranks for call in outcome.calls if not call.is_ok]
    assert {outcome.calls[-1].is_ok for outcome in run.ranks} == {False}, run
    for call in calls:
        known = (errors.HyperCommError, dist.DistNetworkError)
        assert isinstance(call.error, known), call
        assert call.took_s <= ANSWER_S + T + GRACE_S, call


# A clock that jumps moves nothing: what waits looks at one that cannot. A dump alone says to people
# when it was written.
def test_no_clock_that_jumps():
    found = []
    package = Path(hypercomm.__file__).parent
    for path in {*package.rglob("*.py")} - {package / "tools/blame/watch.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                if name in {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}:
                    found.append(f"{path.name}:{node.lineno} {name}")
    assert found == []
