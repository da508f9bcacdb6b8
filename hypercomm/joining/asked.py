"""What a call of `join` asks for, and the job that this means with what a launcher has left."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs

from hypercomm.errors import LaunchError
from hypercomm.launch.launchers import FoundJob, Launcher, find_job, held_in, none_found
from hypercomm.launch.traps import check_alone
from hypercomm.layout.checks import as_int
from hypercomm.layout.text import shown
from hypercomm.process_groups.options import check_timeout

_LAST_PORT = 65_535

_THE_CALL = Launcher("the call", "rank=", ("size=",), advice="give join() address= and port=")
_NOBODY = Launcher("nobody", "rank=", ("size=",))


def _without_spaces(given: Any) -> Any:
    """Leave out the spaces around a name; what is no name is refused later, as it is."""
    return (given.strip() or given) if isinstance(given, str) else given


@attrs.frozen
class Asked:
    """The arguments of a call; None where nothing was given."""

    backend: str | None
    device: Any
    timeout: Any
    rank: int | None
    size: int | None
    local_rank: int | None
    address: str | None = attrs.field(converter=_without_spaces)
    port: int | None
    environment: Mapping[str, str] | None
    need_launcher: bool

    def check(self) -> None:
        """Refuse arguments that cannot be right, whatever the environment holds.

        Raises:
            LaunchError, LayoutError, GroupOptionsError: Says what is wrong.
        """
        check_timeout(self.timeout)
        if not isinstance(self.need_launcher, bool):
            raise LaunchError(f"need_launcher must be a bool, got {shown(self.need_launcher)}")
        if self.environment is not None and not isinstance(self.environment, Mapping):
            raise LaunchError(
                f"environment must be a mapping such as os.environ, got {shown(self.environment)}"
            )
        if (self.rank is None) != (self.size is None):
            given, missing = ("rank", "size") if self.size is None else ("size", "rank")
            raise LaunchError(
                f"{given}={shown(getattr(self, given))} without {missing}=; give both, or neither, "
                f"to be told by the launcher"
            )
        for name in ("rank", "size", "local_rank", "port"):
            value = getattr(self, name)
            smallest = 1 if name in {"size", "port"} else 0
            if value is not None and as_int(value, name) < smallest:
                raise LaunchError(f"{name} must be at least {smallest}, got {value}")
        if self.port is not None and self.port > _LAST_PORT:
            raise LaunchError(f"port must be at most {_LAST_PORT}, got {self.port}")
        if self.size is not None and self.rank is not None and self.rank >= self.size:
            raise LaunchError(
                f"rank={self.rank} and size={self.size} contradict each other: the last rank would "
                f"be {self.size - 1}"
            )
        if self.address is not None and (
            not isinstance(self.address, str) or not self.address.strip()
        ):
            raise LaunchError(
                f"address must be the name or number of rank 0's host, got {shown(self.address)}"
            )

    def variables(self) -> Mapping[str, str]:
        """Return the environment that is meant."""
        return os.environ if self.environment is None else self.environment

    def job(self) -> FoundJob:
        """Return the job that is meant: what is given, before what a launcher has left.

        Raises:
            LaunchError: There is none, and it is needed, or it contradicts itself.
        """
        if self.rank is not None and self.size is not None:
            job = self._given(self.rank, self.size)
        else:
            job = self._found()
        if job.local_rank is None and job.size == 1:
            return attrs.evolve(job, local_rank=0, local_size=1)
        if (
            self.local_rank is not None
            and job.local_size is not None
            and self.local_rank >= job.local_size
        ):
            raise LaunchError(
                f"local_rank={self.local_rank} and {job.local_size} ranks on this host, as with "
                f"{job.told()}, contradict each other; device= gives a rank another device"
            )
        return job

    def _found(self) -> FoundJob:
        """Return the job that a launcher tells of; a world of one where there is none."""
        environment = self.variables()
        found = find_job(environment)
        if found is None and self.need_launcher:
            raise LaunchError(
                none_found(
                    "start the program with torchrun, srun or mpirun, or give rank=, size=, "
                    "address= and port="
                )
            )
        if found is None:
            check_alone(held_in(environment))
            self._check_alone_here()
            said = "no launcher's variable"
            return FoundJob(_NOBODY, 0, 1, self.local_rank, None, said=said)
        return attrs.evolve(
            found,
            local_rank=self._local(found.local_rank),
            address=self.address or found.address,
            port=self.port or found.port,
        )

    def _given(self, rank: int, size: int) -> FoundJob:
        """Return the job that rank and size make; of the environment only what fits them counts."""
        found = None
        try:
            found = find_job(self.variables())
        except LaunchError:  # what was given counts
            found = None
        fits = found is not None and (found.rank, found.size) == (rank, size)
        place = found if fits else None
        return FoundJob(
            _THE_CALL,
            rank,
            size,
            self._local(None if place is None else place.local_rank),
            None if place is None else place.local_size,
            self.address or (None if place is None else place.address),
            self.port or (None if place is None else place.port),
            f"rank={rank} and size={size}",
        )

    def _local(self, found: int | None) -> int | None:
        return found if self.local_rank is None else self.local_rank

    def _check_alone_here(self) -> None:
        """Refuse a meeting place where nothing says who is to meet."""
        if self.address is not None or self.port is not None:
            name = "address" if self.address is not None else "port"
            raise LaunchError(
                f"{name}={shown(getattr(self, name))}, and no launcher has told which rank this "
                f"is; give rank= and size=, too"
            )
