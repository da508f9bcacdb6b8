"""Node lists as SLURM writes them: "node[01-09,12]", and the numbers of tasks beside them.

Source: slurm.conf(5), NodeName, and srun(1), SLURM_TASKS_PER_NODE, https://slurm.schedmd.com.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hypercomm.errors import TopologyError
from hypercomm.layout.text import shown

MOST_HOSTS = 2**20
"""The most hosts that a list may name: more is surely a mistake, and would take all memory."""

_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a node list, in its order.

    Args:
        text: As in "node[01-09,12]-ib,login"; several brackets in a name are multiplied.

    Raises:
        TopologyError: It cannot be read, or names more than `MOST_HOSTS`.

    Example:
        >>> expand_hosts("gpu[08-10,12],login"), expand_hosts("a[1-2]b[5,7]")
        (['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login'], ['a1b5', 'a1b7', 'a2b5', 'a2b7'])
    """
    hosts: list[str] = []
    for name in _names(text):
        hosts.extend(_expand(name, text, MOST_HOSTS - len(hosts)))
    return hosts


def _names(text: str) -> Iterator[str]:
    rest = text.strip()
    while rest:
        found = _NAME.match(rest)
        if found is None:
            break
        yield found.group()
        rest = rest[found.end() :].lstrip()
        if not rest:
            return
        if not rest.startswith(",") or not rest[1:].strip():
            break
        rest = rest[1:].lstrip()
    raise TopologyError(
        f"{shown(text)} is no node list{f': it breaks off at {shown(rest)}' if rest else ''}; "
        f"write it like 'node[01-09,12],login1'"
    )


def _expand(name: str, text: str, room: int) -> list[str]:
    made = [""]
    for inside, outside in _PIECE.findall(name):
        choices = [outside] if outside else _numbers(inside, text, room)
        if len(made) * len(choices) > room:
            raise TopologyError(
                f"{shown(text)} names more than {MOST_HOSTS} hosts, which is surely a mistake"
            )
        made = [start + choice for start in made for choice in choices]
    return made


def _numbers(inside: str, text: str, room: int) -> list[str]:
    """Return the numbers of a bracket, with the zeros that they are written with."""
    numbers: list[str] = []
    for part in inside.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None or (found[2] and int(found[2]) < int(found[1])):
            raise TopologyError(
                f"{shown(part)} in {shown(text)} is no range of hosts; write it like '01-09'"
            )
        first, last = int(found[1]), int(found[2] or found[1])
        if last - first >= room:
            raise TopologyError(
                f"{shown(text)} names more than {MOST_HOSTS} hosts, which is surely a mistake"
            )
        numbers += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    return numbers


def first_of(text: str) -> str:
    """Return the first host of a node list, whatever comes behind it; "" where there is none.

    Example:
        >>> first_of("gpu[03-04,9],login"), first_of("a[1-2]b[5,7]"), first_of("")
        ('gpu03', 'a1b5', '')
    """
    found = _NAME.match(text.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", found.group() if found else "")


def tasks_of(text: str) -> list[tuple[int, int]] | None:
    """Return the tasks of each host, and for how many hosts in a row; None where unreadable.

    Args:
        text: As SLURM_TASKS_PER_NODE writes them.

    Example:
        >>> tasks_of("4(x2),3"), tasks_of("four")
        ([(4, 2), (3, 1)], None)
    """
    found = [
        re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part.strip())
        for part in text.split(",")
    ]
    if None in found:
        return None
    return [(int(one[1]), int(one[2] or 1)) for one in found if one is not None]
