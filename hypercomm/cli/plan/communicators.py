"""How many communicators each rank will have, with and without sharing, and what they take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from hypercomm.cli.plan.keys import Key
from hypercomm.layout import RankLayout

NCCL_CHANNELS = 16
"""What is assumed where nobody says: NCCL's log shows 8 to 32, by machine, as "coll channels"."""

_CONNECTIONS = 2
_BUFFERS = 4 * 2**20 + 2**19 + 4_915_200
"""Simple (NCCL_BUFFSIZE), LL and LL128, in bytes."""


@attrs.frozen
class Communicators:
    """What each rank has of some sets of groups; every rank has equally many.

    Attributes:
        groups: The process groups, one for each key, or for each set of ranks where they share.
        connected: Those of two ranks or more, which are communicators.
        sockets: Those of gloo: every rank connects to every other one of each group.
    """

    groups: int
    connected: int
    sockets: int

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Communicators:
        """Count those of groups of these sizes.

        >>> Communicators.of([2, 1, 4])
        Communicators(groups=3, connected=2, sockets=4)
        """
        every = list(sizes)
        others = [size - 1 for size in every]
        return cls(len(every), sum(map(bool, others)), sum(others))


def nccl_bytes(channels: int = NCCL_CHANNELS) -> int:
    """Return the device memory of one communicator of NCCL, about: the buffers of its rings.

    NCCL gives each channel buffers of its own, for each of the three protocols (NVIDIA/nccl issue
    1450; `src/init.cc` has the sizes: 4 MiB, 512 KiB and 4.69 MiB), and each ring two connections
    (issue 864). Trees, NVLS and all-to-alls take more: two A100s were seen at 544 MB, three and
    four at 688 MB (issue 964). `grid.connect()` measures it.

    Args:
        channels: What NCCL's log calls "coll channels".

    Example:
        24 channels times 2 connections times 9.1875 MiB.

        >>> nccl_bytes(24) / 2**20
        441.0
    """
    return channels * _CONNECTIONS * _BUFFERS


def count(
    keys: Sequence[Key], layout_of: Callable[[Key], RankLayout]
) -> tuple[Communicators, Communicators]:
    """Count the communicators of each rank, first with share="never", then with "identical".

    Keys share a group on one rank where they do on all: the groups of dims are one set of ranks,
    moved to where the others begin, and only one set of such moves covers all ranks.

    Args:
        keys: The groups that are created, each once.
        layout_of: What the dims of a key belong to; all have the same ranks.

    Example:
        Where dp is 1, tp and tp+dp are the same ranks; dp alone connects to nobody.

        >>> layout = RankLayout.parse("tp=2,dp=1")
        >>> keys = [Key(None, ("tp",)), Key(None, ("dp",)), Key(None, ("tp", "dp"))]
        >>> for counted in count(keys, lambda _: layout):
        ...     print(counted)
        Communicators(groups=3, connected=2, sockets=2)
        Communicators(groups=2, connected=1, sockets=1)
    """
    kinds = [layout_of(key).groups(*key.dims) for key in keys]
    every, distinct = (
        Communicators.of(groups.group_size for groups in some)
        for some in (kinds, dict.fromkeys(kinds))
    )
    return every, distinct
