"""Arguments and options of several commands, and functions that read them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from itertools import chain, combinations
from typing import Any, TypeVar

import attrs
import click

from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout
from hypercomm.layout.parsing import (
    infer_sizes,
    parse_groups,
    parse_sizes,
)
from hypercomm.layout.text import short_repr
from hypercomm.layout.views import Views

_Command = TypeVar("_Command", bound=Callable[..., Any])

_ARGUMENT = re.compile(r"\b[a-z_]+(?:=(?:\[.*?\]|\S*))? \((--[^()]+)\)")
"""Matches a Python argument, and the equivalent option of the command line in parentheses."""


def _joined(_: object, __: object, texts: tuple[str, ...]) -> str:
    last = texts[-1]
    is_input = os.path.exists(last) or texts[0].endswith(".json")  # noqa: PTH110 - Path raises for a long text
    if len(texts) > 1 and last.endswith(".json") and not is_input:
        raise LayoutError(
            f"--json prints to stdout, and {short_repr(last)} is one argument too many; "
            f"write --json > {last}"
        )
    return " ".join(texts)


sizes = click.argument("sizes", nargs=-1, required=True, metavar="SIZES", callback=_joined)
groups = click.option(
    "--groups",
    "wanted",
    metavar="DIMS",
    callback=lambda _, __, text: None if text is None else parse_groups(text),
    help="The groups, as in tp,dp+cp. Default: every combination of dims; with more than 6 dims, "
    "every pair.",
)
views = click.option(
    "--view",
    "views",
    multiple=True,
    metavar="NAME:SIZES",
    help="Another factorisation of the ranks, as in expert:ep=4,rest=-1. May be repeated.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def world_size(default: str = "") -> Callable[[_Command], _Command]:
    """Return the option `--world-size` of a command, whose help ends with the default."""
    return click.option(
        "--world-size",
        type=click.IntRange(min=1),
        help=f"The number of ranks, from which a size of -1 is inferred, also in a launch file. "
        f"{default}".rstrip(),
    )


def in_options(message: str) -> str:
    """Return a message with the options of the command line in place of Python's arguments.

    >>> in_options("overlapped= (--overlap) needs traffic= (--traffic), as in on=[..., 8] (--on 8)")
    '--overlap needs --traffic, as in --on 8'
    """
    return _ARGUMENT.sub(r"\1", message)


def read_layout(
    text: str, ranks: int | None = None, option: str = "", room: str = "", rank_offset: int = 0
) -> RankLayout:
    """Read a layout, and infer a size of -1 from the number of ranks.

    Args:
        text: The sizes, as in "tp=2,dp=-1".
        ranks: The number of ranks, or None if it is unknown.
        option: The command's option that sets the number of ranks, or "" if there is none.
        room: A clause for error messages that names the source of the number of ranks. Default: a
            clause such as "--world-size is 8", or "the world has 8" without an option.
        rank_offset: The smallest rank.

    Raises:
        LayoutError: The text cannot be read, or the number of ranks is needed and unknown.
        WorldSizeError: The sizes do not multiply to the number of ranks.

    Example:
        >>> str(read_layout("tp=2,dp=-1", 8))
        'tp=2,dp=4'
    """
    if ranks is None and "=" not in text and os.path.isdir(text):  # noqa: PTH112 - Path raises for a long text
        raise LayoutError(
            f"{short_repr(text)} is a folder; give the path of a launch file, or sizes, as in "
            f"tp=8,dp=4"
        )
    source = ""
    if option:
        source = f", or the number of ranks, as in {option} 16"
        room = room or f"{option} is {ranks}"
    sizes = infer_sizes(parse_sizes(text), ranks, room, source)
    return RankLayout(sizes, rank_offset=rank_offset)


# ---- the groups that a command is about ---------------------------------------------------------

_MANY_DIMS = 6
"""If more dims are larger than 1, only single dims and pairs are shown."""


@attrs.frozen
class Key:
    """The dims of groups. `view` is the view that has the dims, or None for the layout itself."""

    view: str | None
    dims: tuple[str, ...]

    def __str__(self) -> str:
        """Return the key as tables show it.

        >>> str(Key(None, ("tp", "dp"))), str(Key("expert", ("ep",)))
        ('tp+dp', 'expert:ep')
        """
        view = "" if self.view is None else f"{self.view}:"
        return view + "+".join(self.dims)


def combinations_of(layout: RankLayout) -> list[tuple[str, ...]]:
    """Return each dim alone, and all combinations of the dims larger than 1.

    If more than 6 dims are larger than 1, only pairs are combined.

    Example:
        >>> combinations_of(RankLayout("tp=2,cp=1,dp=2"))
        [('tp',), ('cp',), ('dp',), ('tp', 'dp')]
    """
    long = [name for name in layout.dim_names if layout.size_of(name) > 1]
    most = len(long) if len(long) <= _MANY_DIMS else 2
    several = (combinations(long, count) for count in range(2, most + 1))
    return [(name,) for name in layout.dim_names] + list(chain.from_iterable(several))


def format_views(views: Views) -> list[str]:
    """Return views as texts that `read_views` reads.

    Example:
        >>> format_views(read_views(RankLayout("tp=2,dp=2"), ["expert:ep=2,rest=-1"]))
        ['expert:ep=2,rest=2']
    """
    return [f"{name}:{view.layout}" for name, view in views.items()]


def read_views(layout: RankLayout, texts: Sequence[str]) -> Views:
    """Read views such as "expert:ep=2,rest=-1". A second view without a name is called "view2".

    Dims that make the same groups in the layout and in the view are shared.

    Raises:
        LayoutError: A text cannot be read.
        LayoutError, WorldSizeError: The sizes do not fit the layout.

    Example:
        >>> dense = RankLayout("tp=2,dp=2,pp=2")
        >>> str(read_views(dense, ["ep=4,pp=2"])["view1"])
        'ep=4,pp=2 sharing pp'
    """
    views = Views(layout)
    for number, text in enumerate(texts, 1):
        name, colon, sizes = text.rpartition(":")
        if not colon:
            name = f"view{number}"
        if not name.strip() or sizes.split(",")[0].count("=") != 1:  # "expert", ":ep=2", "e=ep=2"
            raise LayoutError(
                f"--view {short_repr(text)} is not a name and sizes; write expert:ep=2,rest=-1"
            )
        room = f"the layout {layout} has {layout.size}"
        inferred = read_layout(sizes, layout.size, room=room).sizes
        other = layout.renumber(tuple(inferred.values()), tuple(inferred))
        both = [dim for dim in layout.dim_names if dim in inferred]
        shared = [dim for dim in both if layout.groups(dim) == other.groups(dim)]
        if shared and layout.groups(*shared) != other.groups(*shared):
            shared = shared[:1]
        views.register(name.strip(), inferred, shared_dims=shared)
    return views


def read_keys(views: Views, wanted: Sequence[tuple[str, ...]] | None) -> list[Key]:
    """Return the key of each set of dims.

    Args:
        views: The layout and its views.
        wanted: The sets of dims. Default: all combinations; dims that a view shares with the layout
            are listed once.

    Raises:
        UnknownDimError: Neither the layout nor a view has the dims.

    Example:
        >>> dense = RankLayout("tp=2,pp=2")
        >>> print(*read_keys(read_views(dense, ["e:ep=2,pp=2"]), None))
        tp pp tp+pp e:ep e:ep+pp
    """
    if wanted is not None:
        return [Key(*views.view_with(dims)) for dims in wanted]
    layouts = {None: views.base} | {name: view.layout for name, view in views.items()}
    return [
        Key(name, layout.order_dims(dims))
        for name, layout in layouts.items()
        for dims in combinations_of(layout)
        if name is None or not {*dims} <= {*views[name].shared_dims}
    ]
