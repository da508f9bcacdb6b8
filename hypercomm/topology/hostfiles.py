"""Hostfiles: a host in each line, with its number of GPUs.

Sources: Open MPI, https://docs.open-mpi.org/en/v5.0.x/launching-apps/scheduling.html ("name
slots=N max_slots=N"); DeepSpeed, https://www.deepspeed.ai/getting-started/ ("name slots=N");
MPICH's Hydra, https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
("name:N").
"""

from __future__ import annotations

import re

from hypercomm.errors import TopologyError
from hypercomm.layout.text import shown
from hypercomm.topology.found import Found

_EXAMPLE = "write a host like 'node01 slots=8' or 'node01:8'"


_KNOWN = (
    *("slots", "max_slots", "max-slots", "slots_max", "slots-max"),
    *("user", "username", "user_name", "user-name", "binding", "ifname"),
)
"""What Open MPI and Hydra write behind a host; only slots says where ranks are."""


def read_hostfile(text: str, source: str) -> Found:
    r"""Read a hostfile.

    Args:
        text: What it holds.
        source: How errors name it.

    Raises:
        TopologyError: A line has no host or a wrong count, or a host is named twice; says where.

    Example:
        >>> dict(read_hostfile("a slots=8  # first\n\nb:4\n", "hosts").slots)
        {'a': 8, 'b': 4}
    """
    slots: dict[str, int | None] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{source}, line {number}"
        host, count = _host_of(words[0])
        if host in slots:
            raise TopologyError(
                f"{where} names {host!r}, as line {lines[host]} did; name each host once, with all "
                f"its GPUs"
            )
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if name not in _KNOWN or not equals or (count is not None and name == "slots"):
                raise TopologyError(f"{where} has {shown(word)} behind the host; {_EXAMPLE}")
            if name == "slots":
                count = value
        if count is not None and (not re.fullmatch(r"[0-9]{1,6}", count) or not int(count)):
            raise TopologyError(
                f"{where} gives {host!r} {shown(count)} GPUs, which is no number of 1 or more; "
                f"{_EXAMPLE}"
            )
        slots[host] = None if count is None else int(count)
        lines[host] = number
    if not slots:
        raise TopologyError(f"{source} names no host; {_EXAMPLE}")
    return Found(source, slots)


def _host_of(word: str) -> tuple[str, str | None]:
    """Return a host, and its count where it stands behind a colon; addresses of IPv6 have many."""
    host, colon, count = word.rpartition(":")
    return (host, count) if colon and ":" not in host and host else (word, None)
