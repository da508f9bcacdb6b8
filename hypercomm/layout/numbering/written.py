"""Written: the ways to make a layout of what is written: texts, sizes, configurations, JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from hypercomm.errors import LayoutError, NotationError, OrderError, WorldSizeError
from hypercomm.layout.numbering.numbering import Numbering
from hypercomm.layout.reading import notation
from hypercomm.layout.reading.checks import LARGEST_RANK, as_names, as_strings, as_tuple, positive
from hypercomm.layout.reading.notation import format_ranks
from hypercomm.layout.reading.shown import did_you_mean, shown
from hypercomm.layout.reading.sizes import (
    as_choices,
    as_size,
    close_sizes,
    completions,
    nearest_multiples,
)
from hypercomm.layout.reading.tables import as_frame, as_html

if TYPE_CHECKING:
    from typing_extensions import Self

VARIABLE = "HYPERCOMM_LAYOUT"
"""The environment variable that holds the sizes of a job's layout."""


def _none_fits(choices: Mapping[str, tuple[int, ...]], world_size: int) -> str:
    """Say that no sizes make a world, and which worlds they would."""
    told = ", ".join(
        f"{name}={list(sizes) if len(sizes) > 1 else sizes[0]}" for name, sizes in choices.items()
    )
    least = math.prod(min(sizes) for sizes in choices.values() if notation.OPEN not in sizes)
    near = nearest_multiples(world_size, least)
    if all(notation.OPEN not in sizes for sizes in choices.values()):
        near = f"leave one dim open with -1, and {near}"
    return (
        f"no sizes of {told} multiply to {world_size} ranks; {near} ranks would do, or allow more "
        f"sizes"
    )


def sizes_of_environment() -> dict[str, int] | None:
    """Read the environment's HYPERCOMM_LAYOUT; None where it is not set.

    Raises:
        NotationError: It cannot be read; names the variable.
    """
    text = os.environ.get(VARIABLE)
    try:
        return None if text is None else notation.parse_sizes(text)
    except NotationError as error:
        raise NotationError(f"the environment's {VARIABLE}: {error}") from error


@attrs.frozen(repr=False)
class Written(Numbering):
    """What `RankLayout` can be made of, beside its fields."""

    # ---- other ways to make one -------------------------------------------------------------

    @classmethod
    def parse(cls, text: str, *, world_size: int | None = None, rank_offset: int = 0) -> Self:
        """Make a layout from sizes as text, first dim fastest; `str(layout)` writes it back.

        Args:
            text: Sizes, as in "tp=2,cp=3,dp=4". One may be -1, or a name alone: it is inferred.
            world_size: The number of ranks that the sizes must multiply to.
            rank_offset: The smallest rank.

        Raises:
            NotationError: The text cannot be read; the message names the offending part.
            WorldSizeError: The sizes do not multiply to `world_size`.

        Example:
            >>> from hypercomm import RankLayout
            >>> RankLayout.parse("tp=2,cp=3,dp=-1", world_size=24).shape
            (2, 3, 4)
        """
        sizes = close_sizes(notation.parse_sizes(text), world_size)
        return cls(tuple(sizes.values()), tuple(sizes), rank_offset)

    @classmethod
    def from_order(
        cls,
        order: str,
        /,
        *,
        world_size: int | None = None,
        rank_offset: int = 0,
        **sizes: int,
    ) -> Self:
        """Make a layout from an order of dims, first one fastest, and their sizes by name.

        A dim of the order without a size has size 1; but with `world_size`, the one dim without
        a size (or with size -1) is inferred. Sizes of 1 that the order does not name are dims
        at its end, as in Megatron's `RankGenerator`.

        Raises:
            NotationError: The order cannot be read, or more than one size is open.
            OrderError: A size larger than 1 belongs to no dim of the order.
            WorldSizeError: The sizes do not multiply to `world_size`.

        Example:
            >>> from hypercomm import RankLayout
            >>> str(RankLayout.from_order("tp-cp-ep-dp-pp", tp=2, cp=1, ep=1, pp=4, world_size=16))
            'tp=2,cp=1,ep=1,dp=2,pp=4'
        """
        names = notation.parse_order(order)
        sizes = {name: as_size(name, size) for name, size in sizes.items()}
        for name, size in sizes.items():
            if name not in names and size != 1:
                raise OrderError(
                    f"dim {name!r} has size {size}, but order {order!r} does not name it; "
                    f"add it to the order"
                )
        marked = notation.OPEN in sizes.values()
        default = 1 if world_size is None or marked else notation.OPEN
        wanted = {name: sizes.get(name, default) for name in dict.fromkeys((*names, *sizes))}
        closed = close_sizes(wanted, world_size)
        return cls(tuple(closed.values()), tuple(closed), rank_offset)

    @classmethod
    def suggest(
        cls, world_size: int, /, *, rank_offset: int = 0, **sizes: int | Iterable[int]
    ) -> list[Self]:
        """List the layouts that fill `world_size` ranks, given what is known of each dim.

        Args:
            world_size: The number of ranks that the sizes must multiply to.
            rank_offset: The smallest rank.
            sizes: For each dim, first one fastest: its size, or the sizes to choose from, or -1
                for any size.

        Returns:
            The layouts, sizes of the earlier dims ascending; empty when nothing fits.

        Example:
            >>> from hypercomm import RankLayout
            >>> [str(layout) for layout in RankLayout.suggest(8, tp=[1, 2, 4], pp=2, dp=-1)]
            ['tp=1,pp=2,dp=4', 'tp=2,pp=2,dp=2', 'tp=4,pp=2,dp=1']
        """
        total = positive(world_size, "world_size")
        if total > LARGEST_RANK:
            raise LayoutError(f"world_size must be at most {LARGEST_RANK}, got {total}")
        if not sizes:
            raise LayoutError("suggest() needs at least one dim, as in suggest(64, tp=8, dp=-1)")
        names = as_names(tuple(sizes))
        choices = {name: as_choices(name, value) for name, value in sizes.items()}
        return [
            cls(shape, names, rank_offset) for shape in completions(list(choices.values()), total)
        ]

    @classmethod
    def fit(
        cls,
        world_size: int,
        /,
        *,
        prefer: Iterable[str] = (),
        rank_offset: int = 0,
        **sizes: int | Iterable[int],
    ) -> Self:
        """Return the best of the layouts that `suggest` lists, as an elastic job needs it.

        Args:
            world_size: The number of ranks that the sizes must multiply to.
            prefer: Dims whose size is to be as large as can be, the first one above all; then all
                but those that are open with -1, in their order.
            rank_offset: The smallest rank.
            sizes: As for `suggest`.

        Raises:
            WorldSizeError: Nothing fits; says which numbers of ranks would do.
            LayoutError: As for `suggest`, or `prefer` names a dim that there is not.

        Example:
            >>> from hypercomm import RankLayout
            >>> str(RankLayout.fit(6, tp=[1, 2, 4], dp=-1))
            'tp=2,dp=3'
            >>> str(RankLayout.fit(3, tp=[1, 2, 4], dp=-1))
            'tp=1,dp=3'
        """
        given = {
            name: as_tuple(size, f"the sizes of dim {name!r}")
            if isinstance(size, Iterable)
            else size
            for name, size in sizes.items()
        }
        layouts = cls.suggest(world_size, rank_offset=rank_offset, **given)
        choices = {name: as_choices(name, size) for name, size in given.items()}
        empty = [name for name, choice in choices.items() if not choice]
        if empty:
            raise LayoutError(f"dim {empty[0]!r} has no sizes to choose from; give some, or -1")
        if not layouts:
            raise WorldSizeError(_none_fits(choices, world_size))
        known = [name for name, choice in choices.items() if notation.OPEN not in choice]
        wanted = dict.fromkeys((*as_strings(prefer, "prefer"), *known))
        return max(layouts, key=lambda layout: [layout.size_of(dim) for dim in wanted])

    @classmethod
    def from_mapping(
        cls,
        config: Mapping[str, int],
        dims: Sequence[str] | None = None,
        *,
        world_size: int | None = None,
        rank_offset: int = 0,
    ) -> Self:
        """Make a layout of sizes by name, such as a section of a YAML or TOML file.

        Args:
            config: The size of each dim, one of them perhaps -1.
            dims: The dims that there may be, the first varying fastest; those that the section
                lacks have size 1. Default: those of the section, in its order.
            world_size: The number of ranks that the sizes must multiply to.
            rank_offset: The smallest rank.

        Raises:
            LayoutError: A size is no int, or the section has a key that is none of `dims`.
            NotationError: More than one size is open, or one is and no world size is given.
            WorldSizeError: The sizes do not multiply to `world_size`.

        Example:
            >>> from hypercomm import RankLayout
            >>> section = {"dp": -1, "tp": 2}  # of a file
            >>> str(RankLayout.from_mapping(section, dims=["tp", "cp", "dp"], world_size=16))
            'tp=2,cp=1,dp=8'
        """
        if not isinstance(config, Mapping):
            raise LayoutError(f"config must map dims to sizes, got {shown(config)}")
        names = as_names(tuple(config) if dims is None else dims)
        unknown = [key for key in config if key not in names]
        if unknown:
            raise LayoutError(
                f"config has the key {shown(unknown[0])}, which is none of dims {names}"
                f"{did_you_mean(unknown[0], names)}"
            )
        sizes = close_sizes({name: config.get(name, 1) for name in names}, world_size)
        return cls(tuple(sizes.values()), tuple(sizes), rank_offset)

    @classmethod
    def from_environment(cls, *, world_size: int | None = None, rank_offset: int = 0) -> Self:
        """Make a layout of the text that the environment's HYPERCOMM_LAYOUT holds.

        Raises:
            NotationError: It is not set, or cannot be read.
            WorldSizeError: The sizes do not multiply to `world_size`.

        Example:
            >>> import os
            >>> from hypercomm import RankLayout
            >>> os.environ["HYPERCOMM_LAYOUT"] = "tp=2,dp=-1"
            >>> str(RankLayout.from_environment(world_size=8))
            'tp=2,dp=4'
            >>> del os.environ["HYPERCOMM_LAYOUT"]
        """
        sizes = sizes_of_environment()
        if sizes is None:
            raise NotationError(
                f"the environment has no {VARIABLE}; set it, as in {VARIABLE}='tp=2,dp=-1', or "
                f"give the sizes"
            )
        try:
            return cls.from_mapping(sizes, world_size=world_size, rank_offset=rank_offset)
        except NotationError as error:
            raise NotationError(f"the environment's {VARIABLE}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Make a layout from what `to_json` wrote.

        Raises:
            LayoutError: The text is not such a form.
        """
        try:
            fields = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise LayoutError(f"this is not the JSON form of a layout: {error}") from error
        known = {"shape", "dim_names", "rank_offset", "strides", "ranks"}
        if not isinstance(fields, dict) or not {"shape", "dim_names"} <= set(fields) <= known:
            raise LayoutError(
                f"the JSON form of a layout is an object with 'shape', 'dim_names' and perhaps "
                f"'rank_offset' and 'strides', or 'ranks', got {shown(text)}"
            )
        return cls(**fields)

    def to_json(self) -> str:
        """Write the layout as JSON; equal layouts write equal text.

        Example:
            >>> from hypercomm import RankLayout
            >>> RankLayout([2, 4], ["tp", "dp"]).to_json()
            '{"shape": [2, 4], "dim_names": ["tp", "dp"], "rank_offset": 0}'
        """
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as a dict of lists, names and numbers, which JSON can hold.

        Example:
            >>> from hypercomm import RankLayout
            >>> RankLayout([2, 4], ["tp", "dp"]).to_dict()
            {'shape': [2, 4], 'dim_names': ['tp', 'dp'], 'rank_offset': 0}
        """
        fields: dict[str, Any] = {"shape": list(self.shape), "dim_names": list(self.dim_names)}
        if self._listing is not None:
            return {**fields, "ranks": list(self.ranks)}
        gaps = {} if self._is_dense else {"strides": list(self.strides)}
        return {**fields, "rank_offset": self.rank_offset, **gaps}

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each rank, and its coordinates.

        Ranks are in the order of `ranks`.

        Raises:
            MissingPackageError: pandas is not installed; says how to install it.
        """
        indices = np.indices(self.shape[::-1])[::-1]  # the first dim varies fastest
        coords = {dim: at.ravel() for dim, at in zip(self.dim_names, indices, strict=True)}
        return as_frame(coords, "rank", list(self.ranks))

    def _repr_html_(self) -> str:
        listed = self._listing is not None
        held = f"{self.size} ranks: {self._listing}" if listed else format_ranks(self.ranks)
        rows = zip(self.dim_names, self.shape, self.strides, strict=True)
        return as_html(f"RankLayout {self}: ranks {held}", ("dim", "size", "stride"), rows)
