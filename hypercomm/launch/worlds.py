"""World size and rank of a process that has not joined its job yet, each by itself."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from hypercomm.errors import LaunchError
from hypercomm.launch.launchers import agreeing, held_in
from hypercomm.launch.traps import check_not_launched
from hypercomm.launch.variables import number

_BY_HAND = {"WORLD_SIZE": 1, "RANK": 0}
"""What may be set by hand, one without the other, and the smallest number."""


@attrs.frozen
class Told:
    """A number that an environment tells.

    Attributes:
        number: The number.
        by: The variables that tell it, with their values, and whose they are.
    """

    number: int
    by: str


def told(variable: str, environment: Mapping[str, str]) -> Told | None:
    """Return the world size or the rank that an environment tells; None where nothing does.

    The reading is that of `find_job`. WORLD_SIZE without RANK, and RANK without it, is an answer,
    too: whoever plans for a job sets what is asked for by hand.

    Args:
        variable: "WORLD_SIZE" or "RANK".
        environment: Variables and their values, such as `os.environ`.

    Raises:
        LaunchError: Variables contradict each other, or hold no numbers.

    Example:
        >>> step = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}
        >>> told("WORLD_SIZE", step).number, told("RANK", step).number
        (8, 5)
        >>> told("WORLD_SIZE", {"WORLD_SIZE": "4096"}).by
        'WORLD_SIZE=4096, of the environment'
        >>> told("RANK", {"WORLD_SIZE": "4096"}) is None
        True
    """
    held = held_in(environment)
    by_hand = _BY_HAND.keys() & held.keys()
    mine = None
    if len(by_hand) == 1:
        name = by_hand.pop()
        mine = Told(number(name, held, _BY_HAND[name]), f"{name}={held[name]}, of the environment")
        mine = mine if name == variable else None
        held = {other: text for other, text in held.items() if other != name}
    jobs = agreeing(held)
    theirs = [job.size if variable == "WORLD_SIZE" else job.rank for job in jobs]
    if mine is None:
        return Told(theirs[0], jobs[0].told()) if jobs else None
    if theirs and jobs[0].size > 1 and theirs[0] != mine.number:
        raise LaunchError(
            f"{mine.by}, contradicts {jobs[0].told()}; unset those that are left from another job"
        )
    return mine


def why_not_told(environment: Mapping[str, str]) -> str | None:
    """Say what was forgotten where nothing tells of a job, and there is to be one.

    Example:
        >>> why_not_told({"SLURM_NTASKS": "8"})  # doctest: +ELLIPSIS
        'SLURM_NTASKS=8, and SLURM_STEP_ID names no step: this is inside an allocation, ...'
        >>> why_not_told({}) is None
        True
    """
    held = held_in(environment)
    if _BY_HAND.keys() & held.keys():  # one of them is there: the other is what is missing
        return None
    try:
        check_not_launched(held)
    except LaunchError as error:
        return str(error)
    return None
