"""The rehearsal: before a transfer, the ends of each message tell each other what they will move.

Each pair of ranks that exchanges something exchanges a header, and then whether all was well; so
those that wait for a rank that refuses hear of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from hypercomm.errors import LayoutError
from hypercomm.layout import RankMapping

_DIGEST = 32
"""Bytes of a header's digest, which is of all that it says."""

_WORDS = 480
"""Bytes of a header's words, cut where they are longer."""


def rehearse(
    mapping: RankMapping,
    peers: Collection[int],
    meant: Mapping[int, Collection[str]] | str,
    device: torch.device,
) -> None:
    """Exchange with each peer what is meant, and whether it is well with everyone else.

    Args:
        mapping: What the transfer follows.
        peers: The ranks that this one exchanges something with.
        meant: What, for each of them; or why this rank refuses, which its caller raises then.
        device: Where this rank's tensor is.

    Raises:
        LayoutError: A peer means something else, or refuses, or one of its own peers does.

    Example:
        >>> from hypercomm import RankLayout
        >>> from hypercomm.testing import fake_world
        >>> alone = RankLayout([1], ["dp"])
        >>> with fake_world(1):
        ...     rehearse(RankMapping(alone, alone), (), {}, torch.device("cpu"))
    """
    if dist.get_backend() == "fake":  # nothing arrives there, and there is nobody to ask
        return
    refusal = meant if isinstance(meant, str) else ""
    place = _place_of_headers(device)
    own = {}
    for peer in peers:
        words = f"refused: {meant}" if isinstance(meant, str) else ", ".join(sorted(meant[peer]))
        own[peer] = _header(mapping, f"{words}, by {mapping}")
    theirs = _swap(own, place)
    astray = [peer for peer in sorted(peers) if theirs[peer] != own[peer]]
    verdict = bytes([bool(refusal or astray)])
    verdicts = _swap(dict.fromkeys(peers, verdict), place)
    if refusal:
        return
    if astray:
        peer = astray[0]
        raise LayoutError(
            f"rank {dist.get_rank()} and rank {peer} mean different transfers, and nothing was "
            f"sent; here: {_read(own[peer])}; there: {_read(theirs[peer])}"
        )
    upset = [peer for peer in sorted(peers) if any(verdicts[peer])]
    if upset:
        raise LayoutError(
            f"nothing was sent: rank {upset[0]}, with which this rank exchanges something, and "
            f"another one mean different transfers; their errors say which"
        )


def _header(mapping: RankMapping, words: str) -> bytes:
    """Write what is meant, after the digest of it and of the mapping."""
    whole = words.encode(errors="replace")
    digest = hashlib.sha256(_digest(mapping) + whole).digest()
    return digest + whole[:_WORDS].ljust(_WORDS, b"\0")


def _read(header: bytes) -> str:
    return header[_DIGEST:].rstrip(b"\0").decode(errors="replace")


@lru_cache(maxsize=128)
def _digest(mapping: RankMapping) -> bytes:
    """The digest of all that a mapping is, the same on every rank."""
    ends = [mapping.source.to_json(), mapping.target.to_json()]
    roles = [mapping.along, mapping.batch_axis, mapping.shards, mapping.pipeline]
    text = json.dumps([*ends, *roles, mapping.leaders, mapping.backward])
    return hashlib.sha256(text.encode()).digest()


def _place_of_headers(device: torch.device) -> torch.device:
    """Where headers are: in plain memory, unless the job moves none, so that all ranks agree."""
    devices = [entry.partition(":")[0] for entry in dist.get_backend_config().split(",")]
    if "cpu" in devices:
        return torch.device("cpu")
    return device if device.type in devices else torch.device(devices[0])


def _swap(own: Mapping[int, bytes], device: torch.device) -> dict[int, bytes]:
    """Give each peer its bytes, and return what it gives: as many."""
    incoming, ops = {}, []
    for peer, content in sorted(own.items()):
        outgoing = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        incoming[peer] = torch.empty_like(outgoing)
        ops.append(dist.P2POp(dist.isend, outgoing, peer))
        ops.append(dist.P2POp(dist.irecv, incoming[peer], peer))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    return {peer: _bytes_of(tensor) for peer, tensor in incoming.items()}


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())
