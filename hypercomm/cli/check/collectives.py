"""The collectives that `hypercomm check` tries, with numbers that say who sent them, and times.

Sizes and bandwidths are those of nccl-tests: algbw is the size over the time, and busbw that times
a factor, so that it compares with the speed of the links whatever the number of ranks; see
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.cli.check.request import Timing

_WIDE = 2**20
"""More than any rank, so that a number can name two ranks."""


@attrs.frozen
class Member:
    """The calling rank in a group, whose ranks are in the order of the group."""

    group: ProcessGroup | None
    ranks: Sequence[int]
    rank: int
    device: torch.device

    @property
    def place(self) -> int:
        """Which one of the group it is."""
        return self.ranks.index(self.rank)

    def numbers(self, rows: Any) -> torch.Tensor:
        """Put integers where the group communicates."""
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def zeros(self, size: int) -> torch.Tensor:
        """Make a message of some bytes."""
        return torch.zeros(size // 4, dtype=torch.float32, device=self.device)

    def synchronize(self) -> None:
        """Wait until the device has done what it was told."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()


Outcome = tuple[object, object]
"""What a collective gave, and what it should."""


@attrs.frozen
class Collective:
    """One collective.

    Attributes:
        name: What messages call it.
        check: Runs it once.
        prepare: Makes what sends a message of some bytes, a multiple of 4 for each rank.
        shares: Whether the size of nccl-tests is that of all ranks' parts together.
    """

    name: str
    check: Callable[[Member], Outcome]
    prepare: Callable[[Member, int], Callable[[], object]]
    shares: bool = False


def compare(member: Member) -> tuple[list[str], list[str]]:
    """Run each collective once; name those that are wrong, and those that the backend lacks."""
    wrong, lacking = [], []
    for collective in COLLECTIVES:
        try:
            got, expected = collective.check(member)
        except (RuntimeError, NotImplementedError) as error:
            if not _lacks(error):
                raise
            lacking.append(collective.name)
            continue
        if got != expected:
            wrong.append(f"{collective.name} gave {got}, expected {expected}")
    return wrong, lacking


def seconds_of(collective: Collective, member: Member, size: int, rounds: int) -> Timing:
    """Time a collective of about so many bytes; the mean of some rounds after one for nothing."""
    unit = 4 * len(member.ranks) if collective.shares else 4
    size = max(size // unit, 1) * unit
    send = collective.prepare(member, size)
    send()
    member.synchronize()
    begin = time.perf_counter()
    for _ in range(rounds):
        send()
    member.synchronize()
    seconds = (time.perf_counter() - begin) / rounds
    return Timing(collective=collective.name, bytes=size, seconds=seconds)


def _lacks(error: Exception) -> bool:
    """Tell an error that says that there is no such thing from one that went wrong."""
    said = str(error).lower()
    return bool(re.search(r"(not|n't) (yet )?(support|implement)|unsupported|no support", said))


# ---- one by one -------------------------------------------------------------------------------


def _own(member: Member) -> torch.Tensor:
    return member.numbers([member.rank + 1, member.rank * member.rank])


def _each(member: Member) -> list[list[int]]:
    return [[rank + 1, rank * rank] for rank in member.ranks]


def _all_reduce(member: Member) -> Outcome:
    total = _own(member)
    dist.all_reduce(total, group=member.group)
    return total.tolist(), [sum(column) for column in zip(*_each(member), strict=True)]


def _all_gather(member: Member) -> Outcome:
    gathered = [torch.zeros_like(_own(member)) for _ in member.ranks]
    dist.all_gather(gathered, _own(member), group=member.group)
    return [tensor.tolist() for tensor in gathered], _each(member)


def _broadcast(member: Member) -> Outcome:
    sent = _own(member)
    dist.broadcast(sent, src=member.ranks[-1], group=member.group)
    return sent.tolist(), _each(member)[-1]


def _reduce_scatter(member: Member) -> Outcome:
    """Part j of rank r is (r + 1) * (j + 1)."""
    parts = [(member.rank + 1) * (place + 1) for place in range(len(member.ranks))]
    got = member.numbers([0])
    _newest("reduce_scatter_single", "reduce_scatter_tensor")(
        got, member.numbers(parts), group=member.group
    )
    return got.tolist(), [sum(rank + 1 for rank in member.ranks) * (member.place + 1)]


def _all_to_all(member: Member) -> Outcome:
    """Part j says who sends it, and to whom."""
    parts = [member.rank * _WIDE + to for to in member.ranks]
    got = member.numbers([0] * len(parts))
    dist.all_to_all_single(got, member.numbers(parts), group=member.group)
    pairs = [divmod(number, _WIDE) for number in got.tolist()]
    return pairs, [(sender, member.rank) for sender in member.ranks]


def _send_receive(member: Member) -> Outcome:
    """Each sends to the next one of the group, the last one to the first."""
    if len(member.ranks) == 1:
        return None, None
    got = torch.zeros_like(_own(member))
    _around(member, _own(member), got)
    return got.tolist(), _each(member)[member.place - 1]


def _around(member: Member, sent: torch.Tensor, got: torch.Tensor) -> None:
    after = member.ranks[(member.place + 1) % len(member.ranks)]
    before = member.ranks[member.place - 1]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, after, member.group),
            dist.P2POp(dist.irecv, got, before, member.group),
        ]
    )
    for work in works:
        work.wait()


def _newest(name: str, older: str) -> Callable[..., Any]:
    """Return a function of torch that has a new name, under which the older one warns."""
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, older)
    return found


# ---- of any size ------------------------------------------------------------------------------


def _send_all_reduce(member: Member, size: int) -> Callable[[], object]:
    data = member.zeros(size)
    return lambda: dist.all_reduce(data, group=member.group)


def _send_all_gather(member: Member, size: int) -> Callable[[], object]:
    gather = _newest("all_gather_single", "all_gather_into_tensor")
    gathered, own = member.zeros(size), member.zeros(size // len(member.ranks))
    return lambda: gather(gathered, own, group=member.group)


def _send_broadcast(member: Member, size: int) -> Callable[[], object]:
    data = member.zeros(size)
    return lambda: dist.broadcast(data, src=member.ranks[0], group=member.group)


def _send_reduce_scatter(member: Member, size: int) -> Callable[[], object]:
    scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")
    parts, own = member.zeros(size), member.zeros(size // len(member.ranks))
    return lambda: scatter(own, parts, group=member.group)


def _send_all_to_all(member: Member, size: int) -> Callable[[], object]:
    sent, got = member.zeros(size), member.zeros(size)
    return lambda: dist.all_to_all_single(got, sent, group=member.group)


def _send_around(member: Member, size: int) -> Callable[[], object]:
    sent, got = member.zeros(size), member.zeros(size)
    return lambda: _around(member, sent, got)


COLLECTIVES = (
    Collective("all-reduce", _all_reduce, _send_all_reduce),
    Collective("all-gather", _all_gather, _send_all_gather, shares=True),
    Collective("broadcast", _broadcast, _send_broadcast),
    Collective("reduce-scatter", _reduce_scatter, _send_reduce_scatter, shares=True),
    Collective("all-to-all", _all_to_all, _send_all_to_all, shares=True),
    Collective("send/receive", _send_receive, _send_around),
)
"""All of them, in the order of `request.COLLECTIVES`."""
