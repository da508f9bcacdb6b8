"""What members of a group call differently: shapes, dtypes, or in another order."""

from __future__ import annotations

from collections import Counter

import attrs

from hypercomm.blame.records import Call, Evidence, GroupId, RankRecord


@attrs.frozen
class Difference:
    """The first calls of one group that do not belong together.

    Attributes:
        group: The group.
        number: Which of the group's calls they are.
        calls: By rank.
        odd: The ranks that differ from most; all of them where most do not agree.
        what: What differs: "shape", "dtype", "root" or "order".
    """

    group: GroupId
    number: int
    calls: dict[int, Call]
    odd: tuple[int, ...]
    what: str

    @property
    def is_decided(self) -> bool:
        """Whether most members agree, and so the others are to blame."""
        return len(self.odd) < len(self.calls)


def differences(evidence: Evidence) -> list[Difference]:
    """Find the first difference of each group.

    Args:
        evidence: What the ranks left behind.
    """
    found = []
    for group, members in evidence.members.items():
        first = _collectives(group, members)
        if first is not None:
            found.append(first)
        found += _messages(group, members)
    return found


def _collectives(group: GroupId, members: list[RankRecord]) -> Difference | None:
    by_rank = {m.rank: {c.number: c for c in m.calls.get(group, ())} for m in members}
    by_rank = {rank: calls for rank, calls in by_rank.items() if calls}
    if len(by_rank) < 2:
        return None
    begin = sorted(min(calls) for calls in by_rank.values())[1]
    end = sorted(max(calls) for calls in by_rank.values())[-2]
    for number in range(begin, end + 1):
        here = {rank: calls[number] for rank, calls in by_rank.items() if number in calls}
        signatures = {rank: call.signature() for rank, call in here.items()}
        if len(set(signatures.values())) > 1:
            return Difference(group, number, here, _odd(signatures), _what(here))
    return None


def _messages(group: GroupId, members: list[RankRecord]) -> list[Difference]:
    """Compare what was sent with what was received, message by message."""
    sent: dict[str, RankRecord] = {}
    for member in members:
        for channel in member.messages.get(group, ()):
            if channel.startswith("send "):
                sent[channel.partition(" ")[2]] = member
    found = []
    for receiver in members:
        for channel, calls in receiver.messages.get(group, {}).items():
            kind, _, route = channel.partition(" ")
            sender = sent.get(route)
            if kind != "recv" or sender is None or not (sender.is_whole and receiver.is_whole):
                continue
            if "recv anybody" in receiver.messages[group]:
                continue
            got = {call.number: call for call in calls}
            pairs = [
                (one, got[one.number])
                for one in sender.messages[group][f"send {route}"]
                if one.number in got
            ]
            for one, other in pairs:
                if one.signature() != other.signature() and sender is not receiver:
                    here = {sender.rank: one, receiver.rank: other}
                    found.append(Difference(group, one.number, here, tuple(here), _what(here)))
                    break
    return found


def _odd(signatures: dict[int, tuple[object, ...]]) -> tuple[int, ...]:
    usual, count = Counter(signatures.values()).most_common(1)[0]
    if count * 2 <= len(signatures):
        return tuple(signatures)
    return tuple(rank for rank, signature in signatures.items() if signature != usual)


def _what(calls: dict[int, Call]) -> str:
    signatures = [call.signature() for call in calls.values()]
    kinds = ("order", "shape", "dtype", "root")
    return next(kind for place, kind in enumerate(kinds) if len({s[place] for s in signatures}) > 1)
