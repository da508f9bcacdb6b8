"""Whether each message of a simulated job that is sent is received, and is what is expected."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

import attrs

from hypercomm.testing.simulation.calls import CallDisagreement, Key, Kind, Ledger


@attrs.frozen
class Channel:
    """What messages go along.

    Attributes:
        group: The number of the process group.
        source: The rank that sends; -1 for whichever does.
        to: The rank that receives.
        tag: The tag.
    """

    group: int
    source: int
    to: int
    tag: int


def channel_of(key: Key, rank: int) -> Channel | None:
    """Return the channel of a call of a rank; None if it is no message."""
    if key.op in {"send", "send_object_list"}:
        return Channel(key.group, rank, -1 if key.peer is None else key.peer, key.tag)
    if key.op in {"recv", "recv_object_list"}:
        return Channel(key.group, -1 if key.peer is None else key.peer, rank, key.tag)
    return None


class Messages:
    """The messages of a job.

    Args:
        ledger: What the ranks call.
        ranks: Those that are simulated: messages from and to others are taken to be right.
    """

    def __init__(self, ledger: Ledger, ranks: Collection[int]) -> None:
        self._ledger = ledger
        self._ranks = ranks
        self._sent: Counter[Channel] = Counter()
        self._received: Counter[Channel] = Counter()
        self._sends: defaultdict[Channel, list[int]] = defaultdict(list)
        self._receives: defaultdict[Channel, list[int]] = defaultdict(list)
        for rank, stream in ledger.streams.items():
            for token in stream:
                if token & 3 not in (Kind.CALLS, Kind.BEGINS):
                    continue
                channel = channel_of(ledger.key(token >> 2), rank)
                if channel is not None:
                    ends = self._receives if channel.to == rank else self._sends
                    ends[channel].append(token >> 2)

    def send(self, channel: Channel) -> int:
        """Send the next message of a channel; return its number."""
        self._sent[channel] += 1
        return self._sent[channel] - 1

    def receive(self, channel: Channel) -> int | None:
        """Receive the next message of a channel; return its number, or None if nobody waits."""
        if channel.source not in self._ranks:
            return None
        self._received[channel] += 1
        return self._received[channel] - 1

    def is_sent(self, channel: Channel, number: int) -> bool:
        """Tell whether a message has been sent by now."""
        return number < self._sent[channel]

    def is_ever_sent(self, channel: Channel, number: int) -> bool:
        """Tell whether a message is sent at any time."""
        return number < len(self._sends.get(channel, ()))

    def told(self, channel: Channel, number: int, why: str) -> CallDisagreement:
        """Say why a message does not come yet."""
        call = self._ledger.collective(self._receives[channel][number])
        group = self._ledger.groups[channel.group]
        return CallDisagreement(group, number + 1, {channel.to: call}, {channel.source: why})

    def differing(self) -> Iterator[CallDisagreement]:
        """Find the first message of each channel that is not what its receiver expects."""
        for channel, sends in self._sends.items():
            ends = zip(sends, self._receives.get(channel, ()), strict=False)
            for number, (send, receive) in enumerate(ends):
                one, other = self._ledger.key(send), self._ledger.key(receive)
                if (one.shapes, one.dtype) == (other.shapes, other.dtype):
                    continue
                calls = {
                    channel.source: self._ledger.collective(send),
                    channel.to: self._ledger.collective(receive),
                }
                words = "; ".join(f"rank {rank} calls {call}" for rank, call in calls.items())
                group = self._ledger.groups[channel.group]
                yield CallDisagreement(group, number + 1, calls, {}, words)
                break

    def unmatched(self) -> Iterator[CallDisagreement]:
        """Find the first message of each channel that is never received, or never sent."""
        any_source = {
            channel: len(receives)
            for channel, receives in self._receives.items()
            if channel.source == -1
        }
        for channel in [*self._sends, *(self._receives.keys() - self._sends.keys())]:
            sends, receives = self._sends.get(channel, ()), self._receives.get(channel, ())
            both = min(len(sends), len(receives))
            group = self._ledger.groups[channel.group]
            surplus = len(sends) - both
            anyone = attrs.evolve(channel, source=-1)
            taken = min(surplus, any_source.get(anyone, 0))
            any_source[anyone] = any_source.get(anyone, 0) - taken
            if surplus > taken and channel.to in self._ranks:
                call = self._ledger.collective(sends[both + taken])
                calls, why = {channel.source: call}, {channel.to: "never receives it"}
                yield CallDisagreement(group, both + taken + 1, calls, why)
            if len(receives) > both and channel.source in self._ranks:
                call = self._ledger.collective(receives[both])
                calls, why = {channel.to: call}, {channel.source: "never sends it"}
                yield CallDisagreement(group, both + 1, calls, why)
