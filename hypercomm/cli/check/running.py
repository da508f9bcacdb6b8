"""Where a check runs: on ranks that it starts on this host, or as one rank of a launched job."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from hypercomm.cli.check.outcome import Outcome
from hypercomm.cli.check.request import Message, Request
from hypercomm.cli.printing import quiet
from hypercomm.cli.speaking import HereError
from hypercomm.errors import HyperCommError, RankFailedError
from hypercomm.launch import report, run_ranks
from hypercomm.launch.launchers import FoundJob


def start(outcome: Outcome, timeout: float, *, as_json: bool) -> int:
    """Run the probe on local ranks, and show what each tells as it comes."""
    request = outcome.request
    if request.backend != "gloo":  # torch is loaded by nobody else here
        from hypercomm.launch.run import check_devices
        from hypercomm.process_groups.options import check_backend

        check_backend(request.backend)
        check_devices(request.backend, request.layout.size)
    with outcome.progress():
        try:
            run_ranks(
                _local_probe,
                request.layout.size,
                args=(request,),
                backend=request.backend,
                timeout=timeout,
                on_message=lambda _, message: outcome.hear(message),
            )
        except RankFailedError as error:
            outcome.failed = error
    return outcome.show(as_json=as_json)


def _local_probe(request: Request) -> None:
    from hypercomm.cli.check.probe import probe, use_device

    local_rank = int(os.environ["LOCAL_RANK"])
    with quiet():
        probe(request, report, use_device(request.backend, local_rank, request.layout.size))


def join(outcome: Outcome, job: FoundJob, timeout: float, *, as_json: bool) -> int:
    """Run the probe as one rank of a launched job; rank 0 shows what all of them tell.

    Raises:
        HyperCommError: The job cannot be joined, or not on this host.
    """
    from datetime import timedelta

    import torch.distributed as dist

    from hypercomm.cli.check.probe import probe, use_device
    from hypercomm.process_groups.options import check_backend

    request, rank = outcome.request, job.rank
    address, port = job.meeting_place()
    host = f"[{address}]" if ":" in address else address
    try:
        check_backend(request.backend)
        device = use_device(request.backend, job.local_rank, job.local_size)
    except HyperCommError as error:
        raise HereError(f"rank {rank} on {socket.gethostname()}: {error}") from error

    def tell(message: Message) -> None:
        if isinstance(message[2], str):  # only those that are done must be gathered
            outcome.hear(message)
            return
        everyone: list[Any] = [None] * job.size
        dist.all_gather_object(everyone, message)
        if rank == 0:
            for each in everyone:
                outcome.hear(each)

    joining: str | None = f"rank {rank}, which was joining {job.size} at {address}, port {port}"
    with quiet(), outcome.progress() if rank == 0 else contextlib.nullcontext():
        try:
            dist.init_process_group(
                request.backend,
                init_method=f"tcp://{host}:{port}",
                rank=rank,
                world_size=job.size,
                timeout=timedelta(seconds=timeout),
            )
            joining = None
            probe(request, tell, device)
        except HyperCommError:
            raise
        except RuntimeError as error:  # a peer that died shows as torch's RuntimeError
            said = " ".join(str(error).split())
            who = joining or outcome.place_of(rank)
            outcome.seen = f"{who}, saw a failure, its own or a peer's: {said}"
        else:
            dist.destroy_process_group()
    return outcome.show(as_json=as_json) if rank == 0 or outcome.seen else 0
