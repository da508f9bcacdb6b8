"""RankLayout: a mixed-radix numbering of ranks with named dims.

A rank is `rank_offset` plus the sum of coordinate times stride over the dims. The FIRST dim
varies fastest, as in Megatron's `order`. In DeviceMesh, JAX and MPI, the last dim varies fastest.

Internally, strides turn coordinates into an offset. The rank of an offset is the first rank plus
the offset, or the rank at that position in a list (see `numbering.Listing`).
"""

from __future__ import annotations

import functools
import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import (
    LayoutError,
    RankOutsideError,
    UnknownDimError,
    WorldSizeError,
)
from hypercomm.layout.checks import (
    LARGEST_RANK,
    LARGEST_WORLD,
    as_int,
    as_names,
    as_ordered,
    as_rank,
    as_ranks,
    as_sizes,
    positive,
    world_too_small,
)
from hypercomm.layout.groups import Membership, RankGroups, StridedGroups
from hypercomm.layout.numbering import (
    Axis,
    Listing,
    are_nested,
    canonical_strides,
    dense_strides,
    find_equal,
    lattice,
    renumbered,
    strides_of,
)
from hypercomm.layout.parsing import (
    UNSPECIFIED,
    Dims,
    as_dims,
    as_size,
    check_spelling,
    infer_sizes,
    known_size,
    nearest_multiples,
    read_sizes,
    sizes_of_environment,
    would_fit,
)
from hypercomm.layout.text import did_you_mean, format_coords, format_sizes, short_repr


@attrs.frozen(init=False, repr=False)
class RankLayout:
    """A numbering of ranks by coordinates along named dims; the first dim varies fastest.

    A layout is a value: frozen, hashable, picklable, and equal to layouts with the same sizes,
    names and numbering. It needs no torch and no cluster.

    Args:
        shape: The sizes as text "tp=2,dp=4", as a mapping {"tp": 2, "dp": 4}, as a list [2, 4] with
            `dim_names`, or as a layout. The first dim varies fastest.
        dim_names: The name of each dim, in the order of `shape`.
        rank_offset: The smallest rank.
        strides: The difference between the ranks of neighbours along each dim, in the order of
            `shape`. Strides need not ascend. Default: the first dim has stride 1, and there are
            no gaps.
        ranks: The rank at each position, the first dim varying fastest, in place of `rank_offset`
            and `strides`. It is needed only if strides cannot express these ranks. The first
            method call about one rank then reads the full list.
        world_size: The number of ranks that the sizes must multiply to. A size of -1 is inferred
            from the world size.
        dims: Sizes by name, in place of `shape` and `dim_names`.

    Raises:
        LayoutError: Arguments are empty or differ in length, a size or stride is not a positive
            int, strides give two positions the same rank, a name is empty, duplicate or not
            printable, the offset is negative, `ranks` does not have one distinct rank for each
            position, two arguments cannot be combined, the text cannot be read, or a size is
            unspecified without a world size.
        WorldSizeError: The sizes do not multiply to `world_size`.

    Example:
        Rank = tp * 1 + cp * 2 + dp * 6, so coordinates (1, 2, 3) make 1 + 4 + 18 = 23.

        >>> layout = RankLayout(tp=2, cp=3, dp=4)
        >>> layout.strides, layout.size
        ((1, 2, 6), 24)
        >>> layout.rank(tp=1, cp=2, dp=3)
        23
        >>> layout.coords(23)
        {'tp': 1, 'cp': 2, 'dp': 3}
        >>> layout.groups("cp")[0]
        (0, 2, 4)
        >>> layout == RankLayout("tp=2,cp=3,dp=4") == RankLayout([2, 3, 4], ["tp", "cp", "dp"])
        True

        The first dim may have the largest stride: rank = tp * 4 + dp * 1.

        >>> RankLayout([2, 4], ["tp", "dp"], strides=[4, 1]).groups("tp")[1]
        (1, 5)

        In a list of ranks, coordinates (0, 1) are position 2, so they select the third rank.

        >>> listed = RankLayout([2, 2], ["tp", "dp"], ranks=[9, 8, 0, 1])
        >>> listed.rank(tp=0, dp=1), listed.coords(8), list(listed.groups("dp"))
        (0, {'tp': 1, 'dp': 0}, [(9, 0), (8, 1)])
    """

    shape: tuple[int, ...]
    dim_names: tuple[str, ...]
    strides: tuple[int, ...]
    rank_offset: int
    """The smallest rank."""
    _listing: Listing | None
    """The ranks, if strides cannot express them."""
    size: int = attrs.field(eq=False, init=False)
    """The number of ranks."""
    last_rank: int = attrs.field(eq=False, init=False)
    """The largest rank."""
    _is_dense: bool = attrs.field(eq=False, init=False)
    """Whether the offset of every rank is equal to the position of the rank in `ranks`."""
    _descending: Sequence[tuple[int, int, int]] = attrs.field(eq=False, init=False)
    """(axis, size, stride) for each dim larger than 1, the largest stride first."""

    def __init__(
        self,
        shape: str | Mapping[str, int] | Iterable[int] | RankLayout | None = None,
        dim_names: Iterable[str] | None = None,
        rank_offset: int = 0,
        *,
        strides: Iterable[int] | None = None,
        ranks: Iterable[int] | None = None,
        world_size: int | None = None,
        **dims: int,
    ) -> None:
        if isinstance(shape, RankLayout):
            if rank_offset or dims or any(one is not None for one in (dim_names, strides, ranks)):
                raise LayoutError(f"{shape!r} already has dims and ranks; omit the other arguments")
            infer_sizes(shape.sizes, world_size)
            self._set(
                shape.shape, shape.dim_names, shape.strides, shape.rank_offset, shape._listing
            )
            return
        sizes = infer_sizes(read_sizes(shape, dim_names, dims), world_size)
        offset = as_int(rank_offset, "rank_offset", 0)
        steps, listing = _read_numbering(sizes, offset, strides, ranks)
        self._set(tuple(sizes.values()), tuple(sizes), steps, offset, listing)

    @classmethod
    def _of(
        cls,
        shape: tuple[int, ...],
        dim_names: tuple[str, ...],
        strides: tuple[int, ...] | None = None,
        rank_offset: int = 0,
        listing: Listing | None = None,
    ) -> RankLayout:
        """Make a layout from values that are already checked."""
        layout = object.__new__(cls)
        layout._set(shape, dim_names, strides, rank_offset, listing)
        return layout

    def _set(
        self,
        shape: tuple[int, ...],
        dim_names: tuple[str, ...],
        strides: tuple[int, ...] | None,
        rank_offset: int,
        listing: Listing | None,
    ) -> None:
        """Set all fields in canonical form.

        If strides can express a list of ranks, the strides are stored instead of the list.
        """
        dense = dense_strides(shape)
        if listing is not None:
            rank_offset = listing.first
            strides = strides_of(shape, listing.array)
            listing = listing if strides is None else None
        strides = dense if strides is None else canonical_strides(shape, strides)
        axes = [axis for axis in zip(range(len(shape)), shape, strides, strict=True) if axis[1] > 1]
        span = sum([(size - 1) * stride for _, size, stride in axes])
        for name, value in (
            ("shape", shape),
            ("dim_names", dim_names),
            ("strides", strides),
            ("rank_offset", rank_offset),
            ("_listing", listing),
            ("size", math.prod(shape)),
            ("last_rank", rank_offset + span if listing is None else max(listing.ranks)),
            ("_is_dense", strides == dense),
            ("_descending", sorted(axes, key=_STRIDE, reverse=True)),
        ):
            object.__setattr__(self, name, value)
        if self.last_rank > LARGEST_RANK:
            raise LayoutError(
                f"{self} at rank_offset {self.rank_offset} needs ranks up to "
                f"{short_repr(self.last_rank)}; torch numbers ranks up to {LARGEST_RANK}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.shape, self.dim_names, self.strides, self.rank_offset, self._listing)
        return RankLayout._of, fields

    # ---- text and other forms ---------------------------------------------------------------

    @classmethod
    def fit(
        cls, world_size: int, /, *, rank_offset: int = 0, **sizes: int | Iterable[int]
    ) -> RankLayout:
        """Choose sizes that fill `world_size` ranks, for a job whose number of ranks changes.

        The first dim gets the largest of its sizes that fits, then the second dim does, and so on.
        A dim of size -1 gets the remaining factor.

        Args:
            world_size: The number of ranks that the sizes must multiply to.
            rank_offset: The smallest rank.
            sizes: The size of each dim, or an iterable of sizes to choose from, the fastest varying
                dim first. The size of one dim may be -1.

        Raises:
            WorldSizeError: No choice fits. The error suggests numbers of ranks that would fit.
            LayoutError: A size is wrong, or several are -1.
            TypeError: A keyword is a misspelt argument, such as `rank_ofset`.

        Example:
            >>> from hypercomm import RankLayout
            >>> str(RankLayout.fit(6, tp=[1, 2, 4], dp=-1))
            'tp=2,dp=3'
            >>> str(RankLayout.fit(3, tp=[1, 2, 4], dp=-1))
            'tp=1,dp=3'
        """
        check_spelling(sizes)
        total = positive(world_size, "world_size")
        choices = {}
        for name, given in sizes.items():
            is_one = isinstance(given, str) or not isinstance(given, Iterable)
            several = [given] if is_one else list(given)  # type: ignore[arg-type]
            choices[name] = sorted([as_size(name, size) for size in several], reverse=True)
        inferred = [name for name, choice in choices.items() if UNSPECIFIED in choice]
        if not choices or not all(choices.values()) or len(inferred) > 1:
            raise LayoutError(
                f"give each dim a size or several sizes to choose from, and -1 to at most one dim; "
                f"got {short_repr(sizes)}"
            )
        possible = [[size for size in choice if total % size == 0] for choice in choices.values()]
        for shape in product(*possible):
            fitting = dict(zip(choices, shape, strict=True))
            known = known_size(fitting)
            if known == total or (UNSPECIFIED in shape and total % known == 0):
                return cls(fitting, rank_offset=rank_offset, world_size=total)
        smallest = math.prod([abs(min(choice)) for choice in choices.values()])
        hint = "" if inferred else " with a further dim of size -1"
        raise WorldSizeError(
            f"no sizes of {short_repr(choices)} multiply to {total} ranks; allow more sizes, or "
            f"use {nearest_multiples(total, smallest)} ranks{hint}"
        )

    @classmethod
    def from_json(cls, text: str) -> RankLayout:
        """Make a layout from the text that `to_json` returned.

        Raises:
            LayoutError: The text is not the JSON form of a layout.
        """
        try:
            fields = json.loads(text)
            return cls(**fields)
        except LayoutError:
            raise
        except (TypeError, ValueError, RecursionError) as error:  # also an int that is too long
            raise LayoutError(
                f"{short_repr(text)} is not the JSON form of a layout: {error}"
            ) from error

    def to_json(self) -> str:
        """Return the layout as JSON. Equal layouts have equal text.

        Example:
            >>> from hypercomm import RankLayout
            >>> RankLayout([2, 4], ["tp", "dp"]).to_json()
            '{"shape": [2, 4], "dim_names": ["tp", "dp"], "rank_offset": 0}'
        """
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the constructor arguments of an equal layout, as lists, strings and numbers."""
        fields = self._arguments()
        if self._is_dense:
            fields.pop("strides", None)
        return {name: list(one) if type(one) is tuple else one for name, one in fields.items()}

    def _arguments(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"shape": self.shape, "dim_names": self.dim_names}
        if self._listing is not None:
            return {**fields, "ranks": self._listing.ranks}
        return {**fields, "rank_offset": self.rank_offset, "strides": self.strides}

    def __str__(self) -> str:
        return format_sizes(self.sizes)

    def __repr__(self) -> str:
        fields = [f"{name}={short_repr(one)}" for name, one in self._arguments().items()]
        return f"RankLayout({', '.join(fields)})"

    def _repr_pretty_(self, printer: Any, _: object) -> None:
        """Print a constructor call in hypothesis and IPython."""
        printer.text(repr(self))

    # ---- which ranks, which dims ------------------------------------------------------------

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim by name, in the layout's order."""
        return dict(zip(self.dim_names, self.shape, strict=True))

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks, the first dim varying fastest. Without `strides` and `ranks`, they ascend."""
        if self._listing is not None:
            return self._listing.ranks
        if self._is_dense:
            return range(self.rank_offset, self.rank_offset + self.size)
        return tuple((self.rank_offset + lattice(self._axes(self.dim_names))).tolist())

    @property
    def is_listed(self) -> bool:
        """Whether the ranks are stored as a list, because strides cannot express them.

        Example:
            >>> from hypercomm import RankLayout
            >>> [RankLayout([3], ["tp"], ranks=ranks).is_listed for ranks in ([1, 3, 5], [1, 3, 4])]
            [False, True]
        """
        return self._listing is not None

    def __contains__(self, rank: object) -> bool:
        try:
            return self._find(rank) is not None
        except RankOutsideError:  # not an int
            return False

    def size_of(self, *dims: Dims, default: int | None = None) -> int:
        """Return the size of a dim, or the product of the sizes of several dims.

        Args:
            dims: One name, several as in "dp+cp", or any iterables of names, in any order.
            default: The size of a dim that the layout does not have. Default: an unknown dim is an
                error.

        Raises:
            UnknownDimError: The layout lacks one of the dims, and `default` is not given.
            LayoutError: No dims are given, or a dim is given twice.

        Example:
            >>> from hypercomm import RankLayout
            >>> layout = RankLayout("tp=2,dp=4")
            >>> layout.size_of("dp"), layout.size_of("tp", "dp"), layout.size_of("cp", default=1)
            (4, 8, 1)
        """
        if default is None:
            return math.prod([self.sizes[name] for name in self.order_dims(dims)])
        return math.prod([self.sizes.get(name, default) for name in as_dims(dims)])

    def order_dims(self, dims: Dims) -> tuple[str, ...]:
        """Return dims in the layout's order, after checking them.

        Args:
            dims: One name, several as in "dp+cp", or any iterable of names, in any order.

        Raises:
            UnknownDimError: The layout does not have a dim of this name.
            LayoutError: No dims are given, or a dim is given twice.

        Example:
            >>> from hypercomm import RankLayout
            >>> layout = RankLayout("tp=2,cp=2,dp=2")
            >>> layout.order_dims(["dp", "tp"]), layout.order_dims("dp+tp")
            (('tp', 'dp'), ('tp', 'dp'))
        """
        if isinstance(dims, str) and dims in self.dim_names:
            return (dims,)
        wanted = as_dims(dims)
        ordered = tuple(filter(wanted.__contains__, self.dim_names))
        if len(ordered) != len(wanted) or not wanted:
            self._check_dims(wanted)
        return ordered

    # ---- one rank ---------------------------------------------------------------------------

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank, by dim name. The inverse of `rank(**coords)`.

        Raises:
            RankOutsideError: The layout does not contain `rank`.
        """
        return dict(zip(self.dim_names, self._index(rank), strict=True))

    def rank(self, /, **coords: int) -> int:
        """Return the rank at some coordinates, one for each dim. The inverse of `coords(rank)`.

        Raises:
            UnknownDimError: The layout does not have a dim of this name.
            LayoutError: A coordinate is missing, or is not in range(size).
        """
        offset = self._offset_at(coords)
        missing = [name for name in self.dim_names if name not in coords]
        if missing:
            raise LayoutError(
                f"rank() needs a coordinate for every dim, but {missing} are missing; "
                f"ranks_where() accepts fewer coordinates"
            )
        return self._rank_at(offset)

    def shift(self, rank: int, dim: str, by: int, periodic: bool = False) -> int | None:
        """Return the rank that is `by` steps away along a dim, as MPI's Cart_shift does.

        Args:
            rank: The rank to start from.
            dim: The dim to step along.
            by: The number of steps: 1 for the next pipeline stage, -1 for the previous one.
            periodic: Whether the dim wraps around, as in a ring.

        Returns:
            The rank, or None if there is no rank at that coordinate.

        Raises:
            UnknownDimError, RankOutsideError: The layout has no such dim or rank.

        Example:
            >>> from hypercomm import RankLayout
            >>> layout = RankLayout("tp=2,pp=3")
            >>> layout.shift(2, "pp", 1), layout.shift(4, "pp", 1)
            (4, None)
            >>> layout.shift(4, "pp", 1, periodic=True)
            0
        """
        axis = self._axis_of(dim)
        here = self._index(rank)[axis]
        there = here + as_int(by, "by")
        if periodic:
            there %= self.shape[axis]
        elif not 0 <= there < self.shape[axis]:
            return None
        offset = self._offset_of(as_rank(rank)) + (there - here) * self.strides[axis]
        return self._rank_at(offset)

    # ---- several ranks, groups --------------------------------------------------------------

    def ranks_where(self, /, **coords: int) -> tuple[int, ...]:
        """Return all ranks that have the given coordinates, in the order of `ranks`.

        Raises:
            UnknownDimError: The layout does not have a dim of this name.
            LayoutError: A coordinate is not in range(size).

        Example:
            >>> RankLayout("tp=2,dp=2,pp=2").ranks_where(pp=1, tp=0)
            (4, 6)
        """
        free = [name for name in self.dim_names if name not in coords]
        offsets = self._offset_at(coords) + lattice(self._axes(free))
        return tuple(self._ranks_at(offsets).tolist())

    def groups(self, /, *dims: Dims) -> RankGroups:
        """Return the disjoint groups whose members differ only in their coordinates along `dims`.

        Members are in the layout's order, whatever the order of `dims`. They ascend in a layout
        without `strides` and `ranks`. Groups are ordered by the coordinates along the other dims,
        the first of these dims varying fastest.

        Raises:
            UnknownDimError: The layout does not have a dim of this name.
            LayoutError: No dims are given, or a dim is given twice.

        Example:
            >>> layout = RankLayout("tp=2,cp=2,dp=2")
            >>> list(layout.groups("tp", "dp"))
            [(0, 1, 4, 5), (2, 3, 6, 7)]
        """
        return groups_over(self, self.order_dims(dims))

    def membership(self, rank: int, /, *dims: Dims) -> Membership:
        """Return a rank's group over some dims, and the rank's position in that group.

        Raises:
            RankOutsideError: The layout does not contain `rank`.
            UnknownDimError: The layout does not have a dim of this name.
            LayoutError: No dims are given, or a dim is given twice.

        Example:
            >>> pp = RankLayout("tp=2,pp=3").membership(3, "pp")
            >>> pp.position, pp.ranks
            (1, (1, 3, 5))
        """
        self._index(rank)  # raises an error about the layout, not about its groups
        groups = self.groups(*dims)
        return Membership(groups.of(rank), groups.position_of(rank))

    def enumerate_ranks(self, dims: Dims) -> NDArray[np.int64]:
        """Enumerate groups with members in the order of `dims`, the LAST dim varying fastest.

        Megatron's `_gen_rank_enum` orders ranks by this rule. If `dims` are in reversed layout
        order, the result equals `groups(*dims).to_array()`.

        Returns:
            An array of shape (number of groups, group size).

        Example:
            >>> layout = RankLayout([2, 2, 2], ["a", "b", "c"])
            >>> layout.enumerate_ranks(["a", "b"]).tolist()
            [[0, 2, 1, 3], [4, 6, 5, 7]]
        """
        given = dims if isinstance(dims, str) else as_ordered(dims, "dims")
        inner = self._check_dims(as_dims(given))
        outer = [name for name in self.dim_names if name not in inner]
        bases = lattice(self._axes(outer))
        return self._ranks_at(bases[:, None] + lattice(self._axes(inner[::-1]))[None, :])

    # ---- other layouts from this one --------------------------------------------------------

    def renumber(self, shape: Iterable[int], dim_names: Iterable[str]) -> RankLayout:
        """Return a layout with other dims over the same ranks in the same order.

        Raises:
            LayoutError: The sizes do not multiply to the number of ranks.

        Example:
            >>> from hypercomm import RankLayout
            >>> RankLayout([4], ["dp"], 8).renumber([2, 2], ["tp", "cp"]).coords(9)
            {'tp': 1, 'cp': 0}
        """
        sizes = read_sizes(shape, dim_names)
        if (size := math.prod(sizes.values())) != self.size:
            raise LayoutError(f"{format_sizes(sizes)} has {size} ranks, but {self} has {self.size}")
        shape, names = tuple(sizes.values()), tuple(sizes)
        strides = renumbered(self._axes(self.dim_names), shape)
        if strides is None:
            return self._of(shape, names, listing=Listing(tuple(self.ranks)))
        return self._of(shape, names, strides, self.rank_offset, self._listing)

    def split(self, dim: str, /, **sizes: int) -> RankLayout:
        """Split a dim into several dims, the first one varying fastest. Ranks keep their positions.

        Raises:
            LayoutError: The sizes (one may be -1) do not multiply to the size of `dim`.

        Example:
            >>> str(RankLayout("tp=2,cp=8").split("cp", cp_inner=2, cp_outer=4))
            'tp=2,cp_inner=2,cp_outer=4'
        """
        axis = self._axis_of(dim)
        size = self.shape[axis]
        try:
            parts = infer_sizes(read_sizes(None, None, sizes), size, f"dim {dim!r} has {size}")
        except (LayoutError, WorldSizeError) as error:
            raise LayoutError(f"dim {dim!r} cannot be split: {error}") from error
        shape = (*self.shape[:axis], *parts.values(), *self.shape[axis + 1 :])
        return self.renumber(shape, (*self.dim_names[:axis], *parts, *self.dim_names[axis + 1 :]))

    def rename(self, /, **names: str) -> RankLayout:
        """Return a layout with new names for some dims, given as old=new.

        Raises:
            UnknownDimError: The layout does not have a dim of the old name.

        Example:
            >>> str(RankLayout("tp=2,dp=4").rename(dp="fsdp"))
            'tp=2,fsdp=4'
        """
        for name in names:
            self._axis_of(name)
        new = as_names([names.get(name, name) for name in self.dim_names])
        return self._of(self.shape, new, self.strides, self.rank_offset, self._listing)

    def select(self, /, **coords: int) -> RankLayout:
        """Return the layout of the ranks that have the given coordinates.

        Its dims are the dims without a coordinate. The ranks and strides are unchanged, so the
        result may have gaps.

        Raises:
            UnknownDimError: The layout does not have a dim of this name.
            LayoutError: A coordinate is not in range(size), or no dim remains.

        Example:
            >>> stage = RankLayout("tp=2,pp=2,dp=2").select(pp=1)
            >>> str(stage), stage.ranks
            ('tp=2,dp=2', (2, 3, 6, 7))
        """
        kept = tuple([name for name in self.dim_names if name not in coords])
        offset = self._offset_at(coords)
        if not kept:
            rank = self._rank_at(offset)
            raise LayoutError(
                f"select() needs at least one dim without a coordinate; rank() returns the rank "
                f"at these coordinates, {rank}"
            )
        axes = self._axes(kept)
        shape = tuple([size for size, _ in axes])
        if self._listing is not None:
            ranks = self._ranks_at(offset + lattice(axes)).tolist()
            return self._of(shape, kept, listing=Listing(tuple(ranks)))
        strides = tuple([stride for _, stride in axes])
        return self._of(shape, kept, strides, self.rank_offset + offset)

    # ---- inside -----------------------------------------------------------------------------

    def _rank_at(self, offset: int) -> int:
        return self.rank_offset + offset if self._listing is None else self._listing.ranks[offset]

    def _ranks_at(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.rank_offset + offsets if self._listing is None else self._listing.array[offsets]

    def _offset_of(self, rank: int) -> int:
        """Return the offset of a rank. It is negative below the first rank or outside the list."""
        return rank - self.rank_offset if self._listing is None else self._listing.offset_of(rank)

    def _axes(self, names: Iterable[str]) -> list[Axis]:
        axes = (self.dim_names.index(name) for name in names)
        return [Axis(self.shape[axis], self.strides[axis]) for axis in axes]

    def _axis_of(self, dim: object) -> int:
        if not isinstance(dim, str) or dim not in self.dim_names:
            hint = did_you_mean(dim, self.dim_names)
            words = re.findall(r"\w+", dim) if isinstance(dim, str) else []
            if len({*words} & {*self.dim_names}) == len(words) > 1 and "+" not in str(dim):
                hint = f"; write {'+'.join(words)!r}"
            raise UnknownDimError(
                f"unknown dim {short_repr(dim)}; this layout has dims {self.dim_names}{hint}"
            )
        return self.dim_names.index(dim)

    def _check_dims(self, wanted: tuple[Any, ...]) -> tuple[str, ...]:
        """Return dims in the order given, after checking them."""
        if not wanted:
            raise LayoutError(f"no dims are given; name at least one of {self.dim_names}")
        for name in wanted:
            self._axis_of(name)
            if wanted.count(name) > 1:
                raise LayoutError(f"dim {name!r} is listed twice in dims {short_repr(wanted)}")
        return wanted

    def _offset_at(self, coords: Mapping[str, int]) -> int:
        """Return the offset of some coordinates. The coordinates of the other dims count as 0."""
        offset = 0
        for name, coordinate in coords.items():
            axis = self._axis_of(name)
            index = as_int(coordinate, f"the coordinate of dim {name!r}")
            if not 0 <= index < self.shape[axis]:
                raise LayoutError(
                    f"the coordinate of dim {name!r} must be in range({self.shape[axis]}), "
                    f"got {short_repr(coordinate)}"
                )
            offset += index * self.strides[axis]
        return offset

    def _index(self, rank: object) -> list[int]:
        """Return the coordinates of a rank, in the order of the dims."""
        index = self._find(rank)
        if index is not None:
            return index
        held = f"ranks {self.rank_offset}..{self.last_rank}"
        if self.last_rank - self.rank_offset >= self.size:
            held = f"some of {held}: {self!r}"
        raise RankOutsideError(f"rank {short_repr(rank)} is not in layout {self}, which has {held}")

    def _find(self, rank: object) -> list[int] | None:
        """Return the coordinates of a rank, or None if the layout does not contain it."""
        rest = self._offset_of(as_rank(rank))
        index = [0] * len(self.shape)
        for axis, size, stride in self._descending:
            coordinate, rest = divmod(rest, stride)
            if not 0 <= coordinate < size:
                return None
            index[axis] = coordinate
        return None if rest else index


_STRIDE = operator.itemgetter(2)


@functools.lru_cache(maxsize=1024)
def groups_over(layout: RankLayout, inner: tuple[str, ...]) -> RankGroups:
    """Return the groups over some dims. The caller passes the dims in layout order."""
    outer_axes: list[Axis] = []
    inner_axes: list[Axis] = []
    for name, size, stride in zip(layout.dim_names, layout.shape, layout.strides, strict=True):
        (inner_axes if name in inner else outer_axes).append(Axis(size, stride))
    origin = layout.rank_offset if layout._listing is None else 0
    return StridedGroups(origin, outer_axes, inner_axes, layout._listing)


def _read_numbering(
    sizes: Mapping[str, int], offset: int, strides: object, ranks: object
) -> tuple[tuple[int, ...] | None, Listing | None]:
    """Return the strides, or the ranks if they are given as a list or by strides that interleave.

    The strides are None if they are not given.
    """
    if strides is not None:
        steps = as_sizes(strides, "strides")
        if ranks is not None:
            raise LayoutError("strides= and ranks= cannot be combined; give one of them")
        if len(steps) != len(sizes):
            raise LayoutError(
                f"strides= must contain one stride for each of {[*sizes]}, got {steps}"
            )
        axes = list(map(Axis, sizes.values(), steps))
        if are_nested(axes):
            return steps, None
        return None, Listing(tuple(_distinct_ranks(sizes, axes, offset).tolist()))
    if ranks is None:
        return None, None
    listing = Listing(as_ranks(ranks, "ranks="))
    if len(listing.ranks) != math.prod(sizes.values()):
        positions = f"shape has {short_repr(math.prod(sizes.values()))} positions"
        raise LayoutError(f"ranks= contains {len(listing.ranks)} ranks, but {positions}")
    if offset not in {0, listing.first}:
        raise LayoutError(
            f"rank_offset={offset} contradicts ranks=, whose smallest rank is {listing.first}; "
            f"omit rank_offset="
        )
    return None, listing


def _distinct_ranks(
    sizes: Mapping[str, int], axes: Sequence[Axis], first: int
) -> NDArray[np.int64]:
    """Return the ranks for strides that are not nested. Raise if two ranks are equal.

    >>> _distinct_ranks({"tp": 2, "dp": 3}, [Axis(2, 3), Axis(3, 2)], 1).tolist()
    [1, 4, 3, 6, 5, 8]
    """
    strides = tuple([stride for _, stride in axes])
    if math.prod(sizes.values()) > LARGEST_WORLD:
        raise LayoutError(
            f"strides {strides} may overlap, which cannot be checked for more than "
            f"{LARGEST_WORLD:,} ranks; make each stride at least as large as the size times "
            f"the stride of the dim with the next smaller stride"
        )
    ranks = first + lattice(axes)
    found = find_equal(ranks)
    if found is not None:
        texts = []
        for position in found:
            index = map(int, np.unravel_index(position, tuple(sizes.values()), order="F"))
            texts.append(format_coords(dict(zip(sizes, index, strict=True))))
        rank = int(ranks[found[0]])
        raise LayoutError(
            f"strides {strides} overlap: ({texts[0]}) and ({texts[1]}) are both rank {rank}"
        )
    return ranks


def read_layout(
    sizes: Any,
    dim_names: Iterable[str] | None = None,
    rank_offset: int = 0,
    world_size: int | None = None,
    **dims: int,
) -> RankLayout:
    """Return a layout that fits into a world.

    In contrast to `RankLayout`, the layout may be smaller than the world, and the sizes may come
    from a grid or from the environment.

    Args:
        sizes: Sizes in any form that `RankLayout` accepts, or an object with the attribute
            `layout`, such as a grid. Default: `dims`, or the sizes in the environment variable
            HYPERCOMM_LAYOUT.
        dim_names: The names of the dims, if `sizes` does not contain them.
        rank_offset: The smallest rank.
        world_size: The number of ranks of the world. An unspecified size is inferred so that
            the layout fills the ranks from `rank_offset` on. Default: the number is unknown, and
            all sizes must be given.
        dims: Sizes by name, in place of `sizes`.

    Raises:
        LayoutError: There are no sizes, or `RankLayout` rejects them.
        WorldSizeError: The layout does not fit into the world.

    Example:
        >>> str(read_layout("tp=2,dp", world_size=8)), read_layout(None, tp=2, dp=2).size
        ('tp=2,dp=4', 4)
        >>> read_layout([2, -1], ["tp", "dp"], 4, 8).ranks
        range(4, 8)
    """
    given = getattr(sizes, "layout", sizes)
    if isinstance(given, RankLayout):
        layout = RankLayout(given, dim_names, rank_offset, **dims)  # type: ignore[arg-type]
    else:
        if given is None and not dims:
            given = sizes_of_environment()
        known = read_sizes(given, dim_names, dims)
        offset = as_int(rank_offset, "rank_offset", 0)
        if UNSPECIFIED in known.values():
            left, room = None, ""
            if world_size is not None:
                left = positive(world_size, "world_size") - offset
                room = f"{left} are left from rank {offset} on" if offset else ""
            known = infer_sizes(known, left if left is None else max(1, left), room)
        layout = RankLayout._of(tuple(known.values()), tuple(known), rank_offset=offset)
    if world_size is not None and layout.last_rank >= world_size:
        where = f" from rank {layout.rank_offset}" if layout.rank_offset else ""
        left = world_size - layout.rank_offset
        has_gaps = layout.last_rank - layout.rank_offset >= layout.size
        hint = "" if has_gaps or left < 1 else would_fit(layout.sizes, left)
        raise world_too_small(f"{layout}{where}", layout.last_rank, world_size, hint)
    return layout
