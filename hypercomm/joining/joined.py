"""Joined: the job that this process takes part in, as `join` found it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist

from hypercomm.process_groups import torch_internals as c10d

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on


@attrs.frozen
class Joined:
    """The job that this process takes part in.

    A context manager: on leaving, the process group that `join` made is destroyed, and no other.

    Attributes:
        launcher: What told of it: "torchrun", "srun", "Open MPI", ..., "the call" where rank and
            size were given, "nobody" in a world of one.
        rank: The rank of this process.
        size: The number of ranks.
        local_rank: Its number among those of its host; None where nothing tells.
        local_size: The ranks on its host; None where nothing tells.
        host: The name of this host.
        address: The host of rank 0; None where the ranks did not meet over a network.
        port: The port there.
        backend: The backend of WORLD.
        device: Where this rank's tensors belong.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    host: str
    address: str | None
    port: int | None
    backend: str
    device: torch.device
    _made: list[Any] = attrs.field(factory=list, repr=False, eq=False)

    def leave(self) -> None:
        """Destroy the process group that `join` made for this object, if it still is WORLD.

        What was there before is left alone. May be called twice.

        Example:
            >>> import hypercomm
            >>> job = hypercomm.join(rank=0, size=1)
            >>> job.leave()
            >>> dist.is_initialized()
            False
        """
        made = self._made.pop() if self._made else None
        if made is not None and dist.group.WORLD is made:
            c10d.destroy_world()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def __str__(self) -> str:
        local = "" if self.local_rank is None else f", {self._local()}"
        place = "" if self.address is None else f", which met at {self.address}:{self.port}"
        return (
            f"rank {self.rank} of {self.size}{local} on {self.host}, by {self.launcher}{place}; "
            f"{self.backend} on {self.device}"
        )

    def _local(self) -> str:
        of = "" if self.local_size is None else f" of {self.local_size}"
        return f"local {self.local_rank}{of}"
