"""Views: other factorisations of a layout's ranks, for example one for the experts of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs

from hypercomm.errors import LayoutError, UnknownDimError, WorldSizeError
from hypercomm.layout.checks import as_names
from hypercomm.layout.layout import RankLayout
from hypercomm.layout.parsing import Dims, as_dims, infer_sizes, read_sizes
from hypercomm.layout.text import did_you_mean, short_repr

BASE = "base"
"""The name of the layout that a grid was created with."""


@attrs.frozen
class View:
    """Another factorisation of a base layout's ranks.

    Attributes:
        name: The name of the view.
        layout: The factorisation.
        shared_dims: The dims with the same groups in the view and in the base, in the base's order.
        wanted_dims: The dims that were requested as shared. After a reshape, such a dim is shared
            if both the new base and the new view have it.
    """

    name: str
    layout: RankLayout
    shared_dims: tuple[str, ...] = ()
    wanted_dims: tuple[str, ...] = ()

    def __str__(self) -> str:
        shared = f" sharing {', '.join(self.shared_dims)}" if self.shared_dims else ""
        return f"{self.layout}{shared}"


class Views(Mapping[str, View]):
    """The views of one base layout, by name. `register` adds a view.

    Args:
        base: The layout whose ranks all views factorise.

    Example:
        >>> views = Views(RankLayout("tp=2,dp=4,pp=2"))
        >>> view = views.register("expert", [4, 2, 2], ["ep", "expt_dp", "pp"], ["pp"])
        >>> str(view), views.view_and_dims(["ep"], "expert")[1]
        ('ep=4,expt_dp=2,pp=2 sharing pp', ('ep',))
    """

    def __init__(self, base: RankLayout) -> None:
        self.base = base
        self._views: dict[str, View] = {}

    def __getitem__(self, name: str) -> View:
        if not isinstance(name, str) or name not in self._views:
            hint = did_you_mean(name, self._views) or "; add it with register_view() first"
            raise UnknownDimError(
                f"View {short_repr(name)} is not registered for {self.base}; registered: "
                f"{list(self._views)}{hint}"
            )
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def register(
        self,
        name: str,
        shape: str | Mapping[str, int] | Iterable[int] | RankLayout,
        dim_names: Iterable[str] | None = None,
        shared_dims: Iterable[str] | None = None,
    ) -> View:
        """Add a view, as `HyperCommGrid.register_view` describes."""
        (name,) = as_names((name,), "view name")
        if name == BASE or name in self._views:
            taken = "is the grid's own layout" if name == BASE else "is already registered"
            raise LayoutError(
                f"View {name!r} {taken}; registered: {list(self._views)}; choose another name"
            )
        given = shape.sizes if isinstance(shape, RankLayout) else shape
        sizes = read_sizes(given, dim_names)
        size = self.base.size
        try:
            sizes = infer_sizes(sizes, size, f"the grid size is {size}")
        except WorldSizeError as error:
            raise LayoutError(f"View {name!r}: {error} ({self.base})") from error
        layout = self.base.renumber(tuple(sizes.values()), tuple(sizes))
        shared = self._shared(name, layout, () if shared_dims is None else as_dims(shared_dims))
        self._views[name] = View(name, layout, shared, shared)
        return self._views[name]

    def refactored(self, base: RankLayout, sizes: Mapping[str, str]) -> Views:
        """Return these views for another base layout of the same ranks.

        Args:
            base: The other layout.
            sizes: The new sizes of views, by name, as in {"expert": "ep=4,expt_dp=2,pp=2"}. Other
                views keep their sizes.

        Raises:
            UnknownDimError: There is no view of this name.
            LayoutError: The sizes of a view do not fit `base`, or the groups over a shared dim
                would differ between the view and `base`.
        """
        for name in sizes:
            self[name]
        others = Views(base)
        for name, view in self.items():
            try:
                given = read_sizes(sizes[name]) if name in sizes else view.layout.sizes
                both = {*given} & {*base.dim_names}
                shared = [dim for dim in view.wanted_dims if dim in both]
                new = others.register(name, given, shared_dims=shared)
                others._views[name] = attrs.evolve(new, wanted_dims=view.wanted_dims)
            except LayoutError as error:
                raise LayoutError(
                    f"view {name!r} ({view}) does not fit {base}: {error}; give its new sizes: "
                    f"views={{{name!r}: 'dim=size,...'}}"
                ) from error
        return others

    def view_and_dims(self, dims: Dims, view: str | None) -> tuple[View | None, tuple[str, ...]]:
        """Return the view that contains some dims, and the dims in layout order.

        The view is None for the base. It is also None if the view shares all of these dims with the
        base. Raises the errors of `ordered`.
        """
        ordered = self.ordered(dims, view)
        found = self.view_or_none(view)
        if found is not None and set(ordered) <= set(found.shared_dims):
            return None, self.base.order_dims(ordered)
        return found, ordered

    def ordered(self, dims: Dims, view: str | None) -> tuple[str, ...]:
        """Return dims in the order of a view or the base.

        Raises:
            UnknownDimError: There is no view of this name, or the view lacks a dim. The error
                names a view that contains the dims, if there is one.
        """
        layout = self.layout_of(view)
        try:
            return layout.order_dims(dims)
        except UnknownDimError as error:
            if not self:
                raise
            layouts = {BASE: self.base} | {name: one.layout for name, one in self.items()}
            having = [name for name, one in layouts.items() if {*as_dims(dims)} <= {*one.dim_names}]
            hint = f"use grid.view({having[0]!r})" if having else "no view has all of these dims"
            views = "; ".join(f"{name} ({one})" for name, one in layouts.items())
            raise UnknownDimError(
                f"{short_repr(dims)} is not in view {view or BASE!r}: {error}; {hint}; views: "
                f"{views}"
            ) from error

    def view_with(self, dims: Dims) -> tuple[str | None, tuple[str, ...]]:
        """Return the first view that has some dims, and the dims in its order.

        The view is None for the base, which is searched first.

        Raises:
            UnknownDimError: Neither the base nor a view has all of these dims.

        Example:
            >>> views = Views(RankLayout("tp=2,dp=4"))
            >>> view = views.register("expert", "ep=4,rest=2")
            >>> views.view_with("rest+ep"), views.view_with("dp")
            (('expert', ('ep', 'rest')), (None, ('dp',)))
        """
        wanted = as_dims(dims)
        layouts = {None: self.base} | {name: view.layout for name, view in self.items()}
        for name, layout in layouts.items():
            if all(dim in layout.dim_names for dim in wanted):
                return name, layout.order_dims(dims)
        if not self:
            return None, self.base.order_dims(dims)
        every = [dim for layout in layouts.values() for dim in layout.dim_names]
        unknown = [dim for dim in wanted if dim not in every]
        what = f"no view has all of {short_repr(wanted)}"
        hint = ""
        if unknown:
            what = f"unknown dim {short_repr(unknown[0])}"
            hint = did_you_mean(unknown[0], every)
        listed = ", ".join(f"view {name} ({view})" for name, view in self.items())
        raise UnknownDimError(f"{what}; this layout is {self.base}, with {listed}{hint}")

    def order_dims(self, dims: Dims) -> tuple[str, ...]:
        """Return dims in the order of the base or view that has them; see `view_with`."""
        return self.view_with(dims)[1]

    def layout_of(self, view: str | None) -> RankLayout:
        """Return the layout of a view, or the base."""
        found = self.view_or_none(view)
        return self.base if found is None else found.layout

    def view_or_none(self, view: str | None) -> View | None:
        """Return a view by name, or None for the base if the name is None or "base"."""
        if view is None or (isinstance(view, str) and view == BASE):
            return None
        return self[view]

    def _shared(self, name: str, layout: RankLayout, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """Return the shared dims in the base's order.

        The groups over each of these dims, and over all of them together, must be the same in the
        base and in the view.
        """
        if not wanted:
            return ()
        try:
            layout.order_dims(wanted)
            shared = self.base.order_dims(wanted)
        except UnknownDimError as error:
            raise UnknownDimError(f"shared_dims of view {name!r}: {error}") from error
        for dims in [*((dim,) for dim in shared), shared]:
            here, there = self.base.groups(*dims), layout.groups(*dims)
            if here != there:
                raise LayoutError(
                    f"Shared dim {'+'.join(dims)!r} has different membership across views: the "
                    f"groups are {here!r} in the grid and {there!r} in view {name!r}; give the "
                    f"dim another name in the view, or change the sizes or the order"
                )
        return shared


def views_of(what: object, layout: RankLayout) -> Views:
    """Return the views of a grid, or of another object with an attribute `views`.

    Args:
        what: The object.
        layout: Its layout. If the object has no views, the result is empty.

    Example:
        >>> from types import SimpleNamespace
        >>> grid = SimpleNamespace(views={"expert": RankLayout("ep=4")})
        >>> list(views_of(grid, RankLayout("tp=4"))), list(views_of("tp=4", RankLayout("tp=4")))
        (['expert'], [])
    """
    if isinstance(what, Views):
        return what
    found = Views(layout)
    for name, view in getattr(what, "views", {}).items():
        found.register(name, view.layout if isinstance(view, View) else view)
    return found
