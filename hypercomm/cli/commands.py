"""The commands and their options; what they do is in the modules named after them."""

from __future__ import annotations

import click

from hypercomm import __version__
from hypercomm.layout import RankLayout
from hypercomm.layout.notation import parse_groups


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hypercomm")
def cli() -> None:
    """Plan and compare grids of ranks, and check that their process groups work."""


_layout = click.argument("layout", metavar="SIZES")
_rank_offset = click.option("--rank-offset", default=0, help="The smallest rank.")
_groups = click.option(
    "--groups", "wanted", metavar="DIMS", help="As in tp,dp+cp. Default: every combination."
)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@cli.command(short_help="Show coordinates and groups of a layout of any size.")
@_layout
@click.option("--world-size", type=int, help="Infer the one size that is -1 from this.")
@_rank_offset
@click.option("--rank", type=int, help="Show where this rank is, and its groups.")
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Ranks on each host.",
)
@_groups
@_as_json
def plan(
    layout: str,
    world_size: int | None,
    rank_offset: int,
    rank: int | None,
    gpus_per_node: int,
    wanted: str | None,
    as_json: bool,
) -> None:
    """Show coordinates and groups of a layout such as tp=8,cp=2,dp=64,pp=8.

    The first dim varies fastest. Nothing is started, and torch is not loaded.
    """
    from hypercomm.cli import plan as command

    parsed = RankLayout.parse(layout, world_size=world_size, rank_offset=rank_offset)
    dims = None if wanted is None else parse_groups(wanted)
    report = command.report(parsed, dims, gpus_per_node, rank)
    command.show(report, as_json=as_json)


@cli.command(short_help="Show which groups a change of layout keeps, ends and makes.")
@click.argument("before", metavar="BEFORE")
@click.argument("after", metavar="AFTER")
@click.option(
    "--world-size",
    type=int,
    help="Infer a size that is -1 from this. Default: from the ranks of the other layout.",
)
@click.option("--before-offset", default=0, help="The smallest rank before.")
@click.option("--after-offset", default=0, help="The smallest rank after.")
@_as_json
def diff(
    before: str,
    after: str,
    world_size: int | None,
    before_offset: int,
    after_offset: int,
    as_json: bool,
) -> None:
    """Show what changes from a layout such as tp=2,cp=2,dp=2 to another such as tp=4,dp=2.

    For every combination of dims: which dims make the same groups afterwards, and which groups are
    kept, gone or new. Nothing is started, and torch is not loaded.
    """
    from hypercomm.cli import diff as command
    from hypercomm.layout.difference import difference

    layouts = command.read(before, after, world_size, before_offset, after_offset)
    command.show(difference(*layouts), as_json=as_json)


@cli.command(short_help="Create every group on real processes and communicate over it.")
@_layout
@_groups
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), default="gloo", show_default=True)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, max=1e6, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds until a hanging check is ended.",
)
@_as_json
def check(layout: str, wanted: str | None, backend: str, timeout: float, as_json: bool) -> int:
    """Create every group of a layout such as tp=2,cp=2,dp=2 and communicate over it.

    Starts the ranks on this machine, or joins the job when torchrun started it:
    torchrun --nproc-per-node 8 -m hypercomm check tp=2,cp=2,dp=2
    """
    from hypercomm.cli import check as command

    dims = None if wanted is None else parse_groups(wanted)
    return command.run(layout, dims, backend, timeout, as_json=as_json)


@cli.command(short_help="Show versions, what works here, and why the rest does not.")
@click.option("--all", "everything", is_flag=True, help="List every private name of torch.")
@_as_json
def doctor(*, everything: bool, as_json: bool) -> int:
    """Show versions, backends, ways of creating groups, self-checks and environment variables.

    Creates groups of this process alone. The exit code is 1 where something that this torch is to
    have is lost, or no group can be created.
    """
    from hypercomm.cli import doctor as command

    return command.run(everything=everything, as_json=as_json)
