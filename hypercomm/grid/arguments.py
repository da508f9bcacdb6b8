"""What calls of a grid take, and how it is checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal, TypedDict

from hypercomm.errors import GroupOptionsError, LayoutError, WorldSizeError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_ordered, is_utf8
from hypercomm.layout.messages import shown
from hypercomm.layout.tiling import format_ranks
from hypercomm.process_groups.keys import Derive

Creation = Literal["auto", "enumerate", "local", "split"]
Share = Literal["never", "identical"]
Cover = Literal["any", "exact"]


class GroupArguments(TypedDict, total=False):
    """The arguments of one `create_pg`, for `create_pgs`; `dims` must be there."""

    dims: str | Iterable[str]
    name: str | None
    view: str | None
    backend: str | None
    timeout: timedelta | None
    pg_options: Any
    group_desc: str | None
    share: Share | None
    derive: Derive | None
    creation: Creation | None
    lazy_init: bool | None


def check_choice(argument: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a word that is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise GroupOptionsError(f"{argument} must be one of {list(choices)}, got {value!r}")


def check_world(layout: RankLayout, world_size: int, cover: str) -> None:
    """Refuse a layout that reaches beyond the world, or must cover it and does not."""
    last = layout.last_rank
    if last >= world_size:
        raise WorldSizeError(
            f"the grid {_factors(layout)} at rank_offset {layout.rank_offset} needs ranks up to "
            f"{last}, but the world has {world_size} (ranks 0..{world_size - 1}); make a size "
            f"smaller, or start at least {last + 1} ranks"
        )
    if cover == "exact" and layout.size != world_size:
        raise WorldSizeError(
            f"cover='exact', but the grid {_factors(layout)} leaves {world_size - layout.size} of "
            f"the world's {world_size} ranks out; change a size so that the sizes multiply to "
            f"{world_size}"
        )


def _factors(layout: RankLayout) -> str:
    sizes = zip(layout.dim_names, layout.shape, strict=True)
    return " * ".join(f"{name}={size}" for name, size in sizes) + f" = {layout.size} ranks"


def check_name(name: str | None) -> None:
    """Refuse a name that no key of the store can hold."""
    if name is not None and (not isinstance(name, str) or not name or not is_utf8(name)):
        raise GroupOptionsError(f"name must be a non-empty string of text, got {shown(name)}")


def as_arguments(
    requests: Iterable[str | Iterable[str] | GroupArguments],
) -> Iterator[Mapping[str, Any]]:
    """List the arguments of `create_pg` that each request of `create_pgs` stands for."""
    for request in as_ordered(requests, "the list in create_pgs(['tp', ['dp', 'cp']])"):
        if not isinstance(request, Mapping):
            yield {"dims": request}
            continue
        known = GroupArguments.__annotations__
        unknown = [name for name in request if name not in known]
        if unknown or "dims" not in request:
            wrong = f"has no argument {unknown[0]!r}" if unknown else "needs 'dims'"
            raise GroupOptionsError(
                f"create_pgs() was given {dict(request)!r}, but create_pg() {wrong}; it takes "
                f"{list(known)}"
            )
        yield request


def as_target(target: str | RankLayout, layout: RankLayout) -> RankLayout:
    """Read what a grid is reshaped to: a layout of the same ranks, or its sizes as text."""
    if isinstance(target, str):
        sized = RankLayout.parse(target, world_size=layout.size)
        if isinstance(layout.ranks, range):
            return RankLayout(sized.shape, sized.dim_names, layout.rank_offset)
        return RankLayout(sized.shape, sized.dim_names, ranks=layout.ranks)
    if not isinstance(target, RankLayout):
        raise LayoutError(
            f"target must be a text like 'tp=4,dp=2' or a RankLayout, got {shown(target)}"
        )
    others = sorted({*target.ranks} ^ {*layout.ranks})
    if others:
        raise WorldSizeError(
            f"a grid keeps its ranks when it is reshaped, but ranks {format_ranks(others)} are not "
            f"in both: {target} has {target.size} ranks from {target.rank_offset} to "
            f"{target.last_rank}, {layout} has {layout.size} from {layout.rank_offset} to "
            f"{layout.last_rank}; build a new grid for others"
        )
    return target


def as_texts(value: Mapping[str, str] | None, what: str) -> Mapping[str, str]:
    """Read texts by name; None stands for none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise LayoutError(f"{what} must map names to texts, got {shown(value)}")
    return value
