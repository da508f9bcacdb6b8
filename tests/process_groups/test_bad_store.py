"""Test that values in the store that hypercomm did not write raise an error that names the key."""

import json
import re

import pytest
import torch.distributed as dist
from hypercomm.process_groups.agreement.records import (
    Claim,
    Entries,
    Outcome,
    Proposer,
    Record,
    Status,
    as_bits,
)
from simulated_job.job import attempt, simulate_job, sleep, this_rank

from hypercomm import HyperCommGrid
from hypercomm.errors import CreationError

BAD = {
    "cut off": lambda text: text[: len(text) // 2],
    "not JSON": lambda _: "{",
    "a list": lambda _: "[[1], 2]",
    "null": lambda _: "null",
    "a long number": lambda _: "9" * 5_000,
    "deep": lambda _: "[" * 100_000,
    "10 MB": lambda _: "x" * 10_000_000,
    "wrong types": lambda _: '{"round": 0, "first": {"rank": "0", "entries": 2}, "outcome": null}',
    "unknown outcome": lambda text: json.dumps({**json.loads(text), "outcome": {"kind": "over"}}),
}


# If another program has written a key that hypercomm uses, the error is short and names the key.
@pytest.mark.parametrize("key", ["/tp/0", "/rank 0"])
@pytest.mark.parametrize("bad", BAD)
def test_foreign_values_raise(bad, key):
    def program():
        grid = HyperCommGrid([2], ["tp"])
        rank = dist.get_rank()
        if rank == 1:
            sleep(0.5)
            held = this_rank().job.server.held
            [name] = [name for name in held if name.endswith(key)]
            held[name] = BAD[bad](held[name].decode()).encode()
        attempt(grid.create_pg, "tp", name=str(rank) if "rank" in key else None)

    error = simulate_job(program, 2).ranks[1].calls[0].error
    assert type(error).__name__ == "CreationError"
    assert re.search(rf"'\S*{key}' holds .*hypercomm did not write", str(error))
    assert len(str(error)) < 2_000


JUNK = [None, True, 1.5, "text", [], {}, [[]], [1.5], [None], {"kind": "over"}, float("nan")]
"""Values of wrong types for most fields."""

_OUTCOME = Outcome("differs", "why", (1,), (2,), ("grid",), "token", "data")
_FIRST = Proposer(0, "rank 0", "host", "digest", "token")
VALUES = [
    Record(3, _FIRST, _OUTCOME, (_OUTCOME,), 1),
    Status(0, "rank 0", "host", "call()", "grid", "key", 1, (1,), 1, _OUTCOME),
    _OUTCOME,
    Entries(("one", "two")),
    Claim("host", 7, "token"),
]
ACCEPTED = {
    ("outcome", "null"),
    *((name, '"text"') for name in ("text", "token", "data", "title", "host", "call", "grid")),
    *((name, '"text"') for name in ("key", "digest")),
    *((name, "[]") for name in ("missing", "absent", "grids", "failed", "waits_for", "lines")),
}
"""The pairs (field, value) in which the value has the right type for the field."""


def places(value, path=()):
    """Yield the path of each field of JSON, and of each item of a list."""
    for at in value if isinstance(value, dict) else range(len(value)):
        yield (*path, at)
        if isinstance(value[at], (dict, list)):
            yield from places(value[at], (*path, at))


# If a field has a value of the wrong type, the error names the key and quotes the value.
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_wrong_types_raise(value):
    tried = 0
    assert type(value).decode("a key", value.encode()) == value
    for path in places(json.loads(value.encode())):
        for junk in JUNK:
            name = [part for part in path if isinstance(part, str)][-1]
            is_item = isinstance(path[-1], int)
            accepted = '"text"' if name in ("grids", "lines") else ""
            text = json.dumps(junk)
            if text == accepted if is_item else (name, text) in ACCEPTED:
                continue
            fields = json.loads(value.encode())
            inner = fields
            for part in path[:-1]:
                inner = inner[part]
            inner[path[-1]] = junk
            held = json.dumps(fields, separators=(",", ":"))
            with pytest.raises(CreationError, match=r"key 'a key' holds .*did not write") as raised:
                type(value).decode("a key", held)
            assert len(str(raised.value)) < 300
            tried += 1
    assert tried > 10


# JSON that differs only in its spacing is also rejected, because a compare-and-set compares bytes
# and would never succeed.
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_other_spacing_raises(value):
    fields = json.loads(value.encode())
    for text in (json.dumps(fields), value.encode() + " ", json.dumps(fields, indent=1)):
        with pytest.raises(CreationError, match="did not write"):
            type(value).decode("a key", text)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.0", " 1", "9" * 20, "null", "[1]", "\u0663"])
def test_counters_that_are_not_numbers_raise(text):
    with pytest.raises(CreationError, match="key 'a key' holds"):
        as_bits("a key", text)


# After such an error, no thread sends another request to the store.
@pytest.mark.parametrize("key", ["/tp/0", "/end", "/first"])
@pytest.mark.parametrize("bad", ["other spacing", "wrong types", "null"])
def test_no_requests_after_an_error(key, bad):
    def change(text):
        return json.dumps(json.loads(text)) + " " if bad == "other spacing" else BAD[bad](text)

    def program():
        grid = HyperCommGrid([2], ["tp"])
        rank = dist.get_rank()
        job = this_rank().job
        sleep(0.5 * rank)
        if rank == 1:
            held = job.server.held
            name = next(name for name in held if name.endswith("/tp/0"))
            name = name if key == "/tp/0" else f"{name}/0{key}"
            held[name] = change(held.get(name, b'{"kind":"agreed"}').decode()).encode()
            job.scheduler.notify(job.server)
        made = attempt(grid.create_pg, "tp")
        sleep(30.0)
        before = job.server.requests
        sleep(30.0)
        return made.kind, job.server.requests - before

    job = simulate_job(program, 2, timeout_s=5.0)
    assert job.is_stuck == "", job
    assert [count for _, count in job.values()] == [0, 0], job
    if key != "/first":
        assert "CreationError" in job.kinds(0), job
