"""Views: other factorisations of the ranks of a layout, such as a dense and an expert one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import attrs
import numpy as np

from hypercomm.errors import LayoutError, UnknownDimError, UnknownViewError, WorldSizeError
from hypercomm.layout.groups.rank_groups import RankGroups
from hypercomm.layout.numbering.numbering import Dims
from hypercomm.layout.rank_layout import RankLayout
from hypercomm.layout.reading.checks import as_dims, as_names, as_sizes, as_strings
from hypercomm.layout.reading.notation import parse_sizes
from hypercomm.layout.reading.shown import did_you_mean, shown
from hypercomm.layout.reading.sizes import as_factors, close_sizes

BASE = "base"
"""What the factorisation that a grid was made with is called among its views."""


@attrs.frozen
class View:
    """Another factorisation of the ranks of a base layout.

    Attributes:
        name: What it is asked for by.
        layout: The factorisation.
        shared_dims: The dims that are also the base's, with the same groups; in the base's order.
        wanted_dims: Dims asked to be shared; kept so that a later reshape can share them again.
    """

    name: str
    layout: RankLayout
    shared_dims: tuple[str, ...] = ()
    wanted_dims: tuple[str, ...] = ()

    def __str__(self) -> str:
        shared = f" sharing {', '.join(self.shared_dims)}" if self.shared_dims else ""
        return f"{self.layout}{shared}"


class Views(Mapping[str, View]):
    """The views of one base layout, by name; `register` adds one.

    Args:
        base: The layout whose ranks all of them factorise.

    Example:
        >>> views = Views(RankLayout.parse("tp=2,dp=4,pp=2"))
        >>> view = views.register("expert", [4, 2, 2], ["ep", "expt_dp", "pp"], ["pp"])
        >>> str(view), views.find(["pp"], "expert")[1], views.find(["ep"], "expert")[1]
        ('ep=4,expt_dp=2,pp=2 sharing pp', ('pp',), ('ep',))
    """

    def __init__(self, base: RankLayout) -> None:
        self.base = base
        self._views: dict[str, View] = {}

    def __getitem__(self, name: str) -> View:
        if not isinstance(name, str) or name not in self._views:
            known = list(self._views) or "none yet"
            raise UnknownViewError(
                f"View {shown(name)} is not registered for {self.base}; there are {known}"
                f"{did_you_mean(name, self._views)}"
            )
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def register(
        self,
        name: str,
        shape: Iterable[int],
        dim_names: Iterable[str],
        shared_dims: Iterable[str] | None = None,
    ) -> View:
        """Add a view, or refuse it as `HyperCommGrid.register_view` says."""
        (name,) = as_names((name,), "view name")
        if name == BASE or name in self._views:
            taken = "is that of the grid's own dims" if name == BASE else "is already registered"
            raise LayoutError(f"View {name!r} {taken}; registered: {list(self._views)}")
        dim_names = as_names(dim_names)
        layout = self.base.renumber(_read_shape(self.base, name, shape, dim_names), dim_names)
        lone = (shared_dims,) if isinstance(shared_dims, str) else shared_dims
        wanted = () if lone is None else as_strings(lone, "shared_dims")
        shared = self._shared(name, layout, wanted)
        self._views[name] = View(name, layout, shared, shared)
        return self._views[name]

    def refactored(self, base: RankLayout, sizes: Mapping[str, str]) -> Views:
        """Return these views for another base layout of the same ranks.

        Args:
            base: The layout.
            sizes: Sizes as text, as in "ep=4,expt_dp=2,pp=2", of the views that change, by name.

        Raises:
            UnknownViewError: There is no such view.
            LayoutError: The sizes do not fit, or dims that are shared make other groups now.
        """
        for name in sizes:
            self[name]
        others = Views(base)
        for name, view in self.items():
            closed = view.layout.sizes
            try:
                if name in sizes:
                    closed = close_sizes(parse_sizes(sizes[name]), base.size)
                both = {*closed} & {*base.dim_names}
                shared = [dim for dim in view.wanted_dims if dim in both]
                new = others.register(name, tuple(closed.values()), tuple(closed), shared)
                others._views[name] = attrs.evolve(new, wanted_dims=view.wanted_dims)
            except (LayoutError, WorldSizeError) as error:
                raise LayoutError(
                    f"view {name!r} ({view}) does not fit {base}: {error}; give its new sizes, "
                    f"views={{{name!r}: 'dim=size,...'}}"
                ) from error
        return others

    def find(self, dims: Dims, view: str | None) -> tuple[View | None, tuple[str, ...]]:
        """Return what dims belong to: a view, or the base (None), and the dims in its order.

        Dims that a view shares are the base's.

        Raises:
            UnknownViewError: There is no such view.
            UnknownDimError: There is no such dim; names the view that has it, if one does.
        """
        dims = dims if isinstance(dims, str) else as_dims(dims)
        if view is not None and (found := self.asked(view)) is not None:
            ordered = self._ordered(found.name, found.layout, dims)
            if not set(ordered) <= set(found.shared_dims):
                return found, ordered
            dims = ordered
        return None, self._ordered(BASE, self.base, dims)

    def ordered(self, dims: Dims, view: str | None) -> tuple[str, ...]:
        """Order dims as a view, or the base, has them.

        Raises:
            UnknownViewError, UnknownDimError: As for `find`.
        """
        found = self.asked(view)
        name, layout = (BASE, self.base) if found is None else (found.name, found.layout)
        return self._ordered(name, layout, dims if isinstance(dims, str) else as_dims(dims))

    def _ordered(
        self, owner: str, layout: RankLayout, dims: str | tuple[str, ...]
    ) -> tuple[str, ...]:
        """Order dims as a layout has them; where others have them, its error says so."""
        try:
            return layout.order_dims(dims)
        except UnknownDimError as error:
            given = as_dims(dims)
            if not all(isinstance(name, str) for name in given):
                raise
            names = set(given)
            layouts = {BASE: self.base} | {view.name: view.layout for view in self.values()}
            having = [name for name, other in layouts.items() if names <= set(other.dim_names)]
            if not having:
                known = {dim for other in layouts.values() for dim in other.dim_names}
                if not names <= known:
                    if not self:
                        raise
                    views = ", ".join(f"{name} ({view.layout})" for name, view in self.items())
                    raise UnknownDimError(f"{error}; the views have others: {views}") from error
                raise UnknownDimError(
                    f"{shown(dims)} are dims of different views, which make no groups together; "
                    f"there are {', '.join(_named(name, of) for name, of in layouts.items())}"
                ) from error
            raise UnknownDimError(
                f"{shown(dims)} is not in view {owner!r} with dim_names {layout.dim_names}, but in "
                f"view {having[0]!r}{_ITSELF if having[0] == BASE else ''}; ask with "
                f"view={having[0]!r}, or ask {_whom(having[0])}"
            ) from error

    def layout_of(self, view: str | None) -> RankLayout:
        """Return the layout of a view, or the base."""
        found = self.asked(view)
        return self.base if found is None else found.layout

    def asked(self, view: str | None) -> View | None:
        """Return the view that is asked for; None for the base, which None and "base" name."""
        if view is None or (isinstance(view, str) and view == BASE):
            return None
        return self[view]

    def _shared(self, name: str, layout: RankLayout, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """Check that shared dims make the same groups in the base and the view, also jointly."""
        if not wanted:
            return ()
        for dim in wanted:
            if wanted.count(dim) > 1:
                raise LayoutError(f"duplicate shared_dims: {dim!r} comes twice in {wanted}")
            for where, names in (("the base view", self.base), ("the view's dim_names", layout)):
                if dim not in names.dim_names:
                    raise UnknownDimError(
                        f"Shared dim {dim!r} of view {name!r} is not in {where} {names.dim_names}"
                    )
        shared = self.base.order_dims(wanted)
        for dims in [*((dim,) for dim in shared), shared]:
            here, there = self.base.groups(*dims), layout.groups(*dims)
            if here != there:
                several = f"s {list(dims)} have" if len(dims) > 1 else f" {dims[0]!r} has"
                raise LayoutError(
                    f"Shared dim{several} different membership across views: the grid's groups are "
                    f"{here!r}, those of view {name!r} are {there!r}; "
                    f"{_first_difference(here, there)}; give the dim another name in the view, or "
                    f"other sizes or another order"
                )
        return shared


_ITSELF = ", the grid's own dims"


def _named(view: str, layout: RankLayout) -> str:
    return f"{view} ({layout}{_ITSELF if view == BASE else ''})"


def _whom(view: str) -> str:
    return "the grid itself" if view == BASE else f"grid.view({view!r})"


def _read_shape(
    base: RankLayout, name: str, shape: Iterable[int], dim_names: tuple[str, ...]
) -> tuple[int, ...]:
    """Read the sizes of a view, which multiply to the number of ranks of its base."""
    try:
        shape = as_sizes(shape)
    except LayoutError as error:
        raise LayoutError(f"View {name!r} shape must be positive ints: {error}") from None
    size = math.prod(shape)
    if len(shape) != len(dim_names) or size == base.size:
        return shape
    sizes = dict(zip(dim_names, shape, strict=True))
    fitting = [
        f"{dim} of {base.size * own // size}"
        for dim, own in sizes.items()
        if base.size * own % size == 0
    ]
    fits = f"; what would do: {', or '.join(fitting)}" if fitting else ""
    raise LayoutError(
        f"View {name!r} {as_factors(sizes)} has size {size}, but the grid size is {base.size} "
        f"({base}){fits}"
    )


def _first_difference(one: RankGroups, other: RankGroups) -> str:
    if (len(one), one.group_size) != (len(other), other.group_size):
        return (
            f"they are {len(one)} groups of {one.group_size} and {len(other)} of {other.group_size}"
        )
    differs = np.flatnonzero((one.to_array() != other.to_array()).any(axis=1))
    index = int(differs[0])
    return f"they first differ in group {index}, {one[index]} and {other[index]}"
