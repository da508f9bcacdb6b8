"""A store that holds what somebody else wrote: a named error."""

import json

import pytest

from hypercomm.errors import CreationError
from hypercomm.process_groups.agreement.protocol import Delete, Exchange, Proposal, Read, propose
from hypercomm.process_groups.agreement.status import Status, find_deadlock, status_key

BAD = {
    "cut off": lambda text: text[: len(text) // 2],
    "no JSON": lambda _: "{",
    "a list": lambda _: "[[1], 2]",
    "null": lambda _: "null",
    "a long number": lambda _: "9" * 5_000,
    "deep": lambda _: "[" * 100_000,
    "10 MB": lambda _: "x" * 10_000_000,
    "wrong types": lambda _: '{"round": 0, "first": {"rank": "0", "entries": 2}, "outcome": null}',
    "an unknown end": lambda text: json.dumps({**json.loads(text), "outcome": {"kind": "over"}}),
}


def drive(steps, keys):
    """Run steps of the protocol on a dict."""
    reply = None
    while True:
        try:
            operation = steps.send(reply)
        except StopIteration as stop:
            return stop.value
        if isinstance(operation, Delete):
            reply = [keys.pop(key, None) for key in operation.keys]
            continue
        reply = keys.get(operation.key)
        if isinstance(operation, Exchange) and (reply or "") == operation.expected:
            reply = keys[operation.key] = operation.text
        assert isinstance(operation, Exchange | Read)


# A record that holds something else is an error that names its key, and stays short.
@pytest.mark.parametrize("bad", BAD)
def test_bad_records(bad):
    keys = {}
    drive(propose("job/calls", Proposal(0, "host", ("create tp",))), keys)
    keys["job/calls"] = BAD[bad](keys["job/calls"])
    with pytest.raises(
        CreationError, match=r"'job/calls' holds .*hypercomm did not write"
    ) as error:
        drive(propose("job/calls", Proposal(1, "host", ("create tp",))), keys)
    assert len(str(error.value)) < 2_000


# A rank that fails twice before others arrive ends two rounds, although it proposes the same.
def test_two_refusals():
    keys = {}
    for number in range(2):
        refusal = Proposal(0, "host", refusal="no such file", number=number)
        assert drive(propose("job/calls", refusal, number - 1), keys).round == number


# A report of a rank that holds something else is such an error too.
@pytest.mark.parametrize("bad", BAD)
def test_bad_reports(bad):
    own = Status(0, "host", "create_pg('tp')", "", "job/calls", 0, waits_for=(1,))
    other = Status(1, "host", "create_pg('tp')", "", "job/other", 0, waits_for=(0,))
    keys = {status_key("job", 1): BAD[bad](other.text())}
    with pytest.raises(CreationError, match=r"'job/rank 1' holds .*hypercomm did not write"):
        drive(find_deadlock("job", own, {}), keys)
