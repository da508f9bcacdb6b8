"""A store that holds what somebody else wrote: a named error, in a simulated job."""

import json
import re

import pytest
import torch.distributed as dist
from simulated_job.job import attempt, simulate_job, sleep, this_rank

from hypercomm import HyperCommGrid

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


# A record of a call, or a report of a rank, that holds something else is an error that names its
# key, and stays short.
@pytest.mark.parametrize("key", ["/tp/0", "/rank 0"])
@pytest.mark.parametrize("bad", BAD)
def test_bad_keys(bad, key):
    def program():
        grid, rank = HyperCommGrid([2], ["tp"]), dist.get_rank()
        if rank == 1:
            sleep(0.5)
            held = this_rank().job.server.held
            [name] = [name for name in held if name.endswith(key)]
            held[name] = BAD[bad](held[name].decode()).encode()
        attempt(grid.create_pg, "tp", name=f"{rank}" if "rank" in key else None)

    error = simulate_job(program, 2).ranks[1].calls[0].error
    assert type(error).__name__ == "CreationError"
    assert re.search(rf"'\S*{key}' holds .*hypercomm did not write", str(error))
    assert len(str(error)) < 2_000
