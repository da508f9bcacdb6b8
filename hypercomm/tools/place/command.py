"""`hypercomm place`: show which groups cross hosts, domains and switches, and the best order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from hypercomm.cli import options
from hypercomm.cli.options import in_options, read_layout, read_views
from hypercomm.cli.printing import print_json, write
from hypercomm.tools.launch_files.command import with_files
from hypercomm.tools.place.live import machine
from hypercomm.tools.place.placing import layout_on, place

_Command = TypeVar("_Command", bound=Callable[..., Any])


def on_option(*default: str) -> Callable[[_Command], _Command]:
    """Return the option `--on` of a command. Without a default, the option is required."""
    return click.option(
        "--on",
        multiple=True,
        required=not default,
        default=default or None,
        show_default=" ".join(default) or False,
        help="The machine: GPUs per host and domain (4,72), a hostfile, a node list, "
        "topology.conf, topology.yaml, or 'live' in a job. May be repeated. The first value that "
        "names hosts sets their order.",
    )


@with_files("sizes")
@click.command("place")
@options.sizes
@options.world_size("Default: the GPUs of the machine.")
@on_option()
@click.option("--traffic", help="Bytes that a rank sends in a step, as in tp=40G,dp=6.5G,pp=100M.")
@click.option(
    "--overlap",
    "overlapped",
    default="",
    help="Dims whose traffic overlaps with computation, as in dp.",
)
@click.option(
    "--weights", default="", help="Cost of a byte that crosses a level, as in host=1,leaf=7."
)
@click.option("--groups", default="", metavar="DIMS", help="More groups to report, as in tp+dp.")
@options.views
@options.as_json
def place_command(
    sizes: str,
    world_size: int | None,
    on: tuple[str, ...],
    views: Sequence[str],
    as_json: bool,
    **given: Any,
) -> int:
    """Place a layout on a machine.

    Show how the groups of a layout such as tp=4,dp=16,pp=4 are spread over a machine. The table
    shows how many groups of each dim leave their host, domain or switch, and how many bytes cross.
    Below the table is the best order of the dims, and of the ranks if consecutive ranks alternate
    between hosts. The search for this order leaves out the groups of views, such as those of
    experts. No process is started, and torch is loaded for --on live only.
    """
    where = machine(on)
    if where is None:
        return 0
    if world_size is None:
        layout = layout_on(sizes, where)
    else:
        layout = read_layout(sizes, world_size, "--world-size")
    found = place(read_views(layout, views), where, **given)
    if as_json:
        notes = [in_options(note) for note in found.notes]
        report = found.to_dict() | {"notes": notes, "better": None, "reordered": None}
        if (best := found.best) is not found:
            report["better"] = {"advice": found.advice_for(best), **best.to_dict()}
        if (other := found.reordered) is not None:
            ranks = {"rank_list": list(other.layout.ranks)}
            report["reordered"] = {"advice": found.advice_for(other), **ranks, **other.to_dict()}
        print_json(report)
    else:
        write(in_options(f"{found}\n"))
    return 0
