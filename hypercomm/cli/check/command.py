"""The command `hypercomm check`: its options, and where it is to run."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from hypercomm.cli import options
from hypercomm.cli.check.request import Request, Sweep, read_sizes
from hypercomm.cli.check.schema import SCHEMA
from hypercomm.cli.plan.keys import read_keys, read_views
from hypercomm.cli.printing import schema_option
from hypercomm.errors import WorldSizeError
from hypercomm.launch.launchers import FoundJob, find_job
from hypercomm.layout import RankLayout

_MOST_LOCAL_RANKS = 64

_TIMEOUT_S, _SWEEP_TIMEOUT_S = 120.0, 1800.0


@click.command(short_help="Create every group on real processes and communicate over it.")
@options.sizes
@options.groups
@click.option(
    *("--nprocs", "--nproc", "--world-size", "ranks"),
    type=int,
    help="The number of ranks; infers the one size that is -1.",
)
@click.option(
    *("--view", "views"),
    multiple=True,
    metavar="NAME:SIZES",
    help="Check another factorisation, too, as in expert:ep=4,rest=-1. May be given several times.",
)
@click.option(
    "--backend",
    default="gloo",
    show_default=True,
    help="Any that torch knows, as in nccl or cpu:gloo,cuda:nccl.",
)
@click.option(
    *("--sizes", "messages"),
    metavar="BYTES",
    help="Time each collective with messages of these sizes, as in 1K..64M or 8,1M.",
)
@click.option(
    "--factor",
    type=click.IntRange(min=2),
    default=4,
    show_default=True,
    help="From one of the --sizes to the next.",
)
@click.option(
    "--iters",
    type=click.IntRange(min=1, max=10_000),
    default=5,
    show_default=True,
    help="How often each of the --sizes is sent.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, max=1e6, min_open=True),
    help=f"Seconds until a hanging check is ended. Default: {_TIMEOUT_S:g}, with --sizes "
    f"{_SWEEP_TIMEOUT_S:g}.",
)
@options.as_json
@schema_option(SCHEMA)
def check(
    sizes: str,
    wanted: Sequence[tuple[str, ...]] | None,
    ranks: int | None,
    views: Sequence[str],
    backend: str,
    messages: str | None,
    factor: int,
    iters: int,
    timeout: float | None,
    as_json: bool,
) -> int:
    """Create every group of a layout such as tp=2,cp=2,dp=2 and communicate over it.

    Starts the ranks on this machine, or joins the job when a launcher started it (torchrun, srun,
    mpirun):

    torchrun --nproc-per-node 8 -m hypercomm check tp=2,cp=2,dp=2
    """
    # torch reads it when it is loaded: its own reports of a dead peer would drown ours.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    timeout = timeout or (_SWEEP_TIMEOUT_S if messages else _TIMEOUT_S)
    job = _launched()
    layout = _read_layout(sizes, ranks, job)
    others = read_views(layout, views)
    request = Request(
        layout,
        keys=read_keys(layout, others, wanted),
        backend=backend,
        views=others,
        sweep=Sweep(read_sizes(messages, factor) if messages else (), iters),
    )

    from hypercomm.cli.check.outcome import Outcome
    from hypercomm.cli.check.running import join, start

    if job is not None:
        return join(Outcome(request), job, timeout, as_json=as_json)
    if layout.size > _MOST_LOCAL_RANKS:
        raise WorldSizeError(
            f"{layout} needs {layout.size} ranks, and at most {_MOST_LOCAL_RANKS} are started on "
            f"one machine; start it with torchrun on several, or look at it with 'hypercomm plan'"
        )
    return start(Outcome(request), timeout, as_json=as_json)


def _launched() -> FoundJob | None:
    """Return the job that this process is a rank of; one of a single rank needs a meeting place."""
    job = find_job(os.environ)
    if job is None or (job.size == 1 and not os.environ.get("MASTER_ADDR")):
        return None
    job.meeting_place()
    return job


def _read_layout(sizes: str, ranks: int | None, job: FoundJob | None) -> RankLayout:
    """Read the sizes, which are to make as many ranks as there are."""
    if job is None:
        return options.read_layout(sizes, ranks, "--nprocs")
    if ranks not in {None, job.size}:
        raise WorldSizeError(f"--nprocs is {ranks}, but {_ranks_of(job)}; leave --nprocs out")
    return options.read_layout(sizes, job.size, "--nprocs", room=_ranks_of(job))


def _ranks_of(job: FoundJob) -> str:
    return options.says(job.size, job.told())
