"""Which sizes make a world: inferring an open size, listing completions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hypercomm.errors import NotationError, WorldSizeError
from hypercomm.layout.reading.checks import as_int, as_tuple, positive
from hypercomm.layout.reading.notation import OPEN
from hypercomm.layout.reading.shown import shown


def close_sizes(sizes: Mapping[str, int], world_size: int | None, room: str = "") -> dict[str, int]:
    """Replace the one open size, if any, by what makes the product equal to `world_size`.

    With `world_size` and nothing open, the product is checked against it. `room` is the error's
    clause about that number, by default that it is the world size.

    Raises:
        NotationError: More than one size is open, or one is and no world size is given.
        WorldSizeError: The product of the sizes does not divide, or does not equal, the world size.

    >>> close_sizes({"tp": 2, "dp": -1}, 8)
    {'tp': 2, 'dp': 4}
    """
    sizes = {name: as_size(name, size) for name, size in sizes.items()}
    unknown = check_one_open([name for name, size in sizes.items() if size == OPEN])
    if world_size is None:
        if unknown:
            raise NotationError(
                f"the size of dim {unknown!r} is open; give it, or give world_size="
                f"{perhaps_meant(unknown)}"
            )
        return sizes
    positive(world_size, "world_size")
    known = known_size(sizes)
    made = (
        f"{as_factors(sizes)} = {shown(known)} ranks, but {room or f'world_size is {world_size}'}"
    )
    if unknown is None and known != world_size:
        raise WorldSizeError(f"{made}; change a size, or leave one open with -1")
    if world_size % known:
        raise WorldSizeError(
            f"{made}, no multiple of {shown(known)}, so no size of {unknown!r} fits; the nearest "
            f"numbers of ranks that would do are {nearest_multiples(world_size, known)}"
        )
    return {name: world_size // known if size == OPEN else size for name, size in sizes.items()}


def perhaps_meant(name: str) -> str:
    """Ask, for an error message, whether the name of an open dim was to end with its size.

    >>> perhaps_meant("tp8"), perhaps_meant("dp")
    ("; did you mean 'tp=8'?", '')
    """
    typed = re.fullmatch(r"(\D+)([1-9][0-9]*)", name, re.ASCII)
    return f"; did you mean '{typed[1]}={typed[2]}'?" if typed else ""


def check_one_open(names: Sequence[str]) -> str | None:
    """Return the dim whose size is to be inferred, if there is one.

    Raises:
        NotationError: There are several.

    >>> check_one_open(["dp"])
    'dp'
    """
    if len(names) > 1:
        raise NotationError(
            f"only one size can be inferred, but {', '.join(names)} are all open; "
            f"give the sizes of all but one"
        )
    return names[0] if names else None


def known_size(sizes: Mapping[str, int]) -> int:
    """Multiply the sizes that are not open.

    >>> known_size({"tp": 2, "dp": -1, "pp": 3})
    6
    """
    return math.prod(size for size in sizes.values() if size != OPEN)


def as_factors(sizes: Mapping[str, int]) -> str:
    """Write a product of the sizes that are not open, for error messages.

    >>> as_factors({"tp": 2, "dp": -1, "pp": 3})
    'tp=2 * pp=3'
    """
    return " * ".join(f"{name}={size}" for name, size in sizes.items() if size != OPEN) or "1"


def as_size(name: str, size: object) -> int:
    """Read the size of one dim, which may be open."""
    what = f"the size of dim {name!r}"
    return OPEN if as_int(size, what) == OPEN else positive(size, what)


def as_choices(name: str, value: object) -> tuple[int, ...]:
    """Read the size of one dim, or the sizes to choose from."""
    choices = (
        as_tuple(value, f"the sizes of dim {name!r}") if isinstance(value, Iterable) else (value,)
    )
    return tuple(as_size(name, size) for size in choices)


def nearest_multiples(number: int, factor: int) -> str:
    """Name the positive multiples of `factor` around `number`, for error messages.

    >>> nearest_multiples(10, 4)
    '8 and 12'
    """
    below = number // factor * factor
    return f"{below} and {below + factor}" if below > 0 else f"{factor}"


def nearest_divisors(number: int, near: int) -> str:
    """Name the divisors of `number` around `near`, for error messages.

    >>> nearest_divisors(16, 6)
    '4 or 8'
    """
    fitting = divisors(number)
    below = [divisor for divisor in fitting if divisor < near][-1:]
    above = [divisor for divisor in fitting if divisor > near][:1]
    return " or ".join(map(str, below + above))


def divisors(number: int) -> list[int]:
    """List the divisors of a positive integer, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in reversed(small)]
    return small + large[small[-1] == large[0] :]


def completions(choices: Sequence[Sequence[int]], total: int) -> Iterator[tuple[int, ...]]:
    """Make all shapes with one size of each choice (-1 for any) that multiply to `total`.

    >>> list(completions([[2, 4], [-1]], 8))
    [(2, 4), (4, 2)]
    """
    if not choices:
        if total == 1:
            yield ()
        return
    first, *rest = choices
    fitting = divisors(total)
    for size in fitting if OPEN in first else sorted(set(first).intersection(fitting)):
        for others in completions(rest, total // size):
            yield (size, *others)


def misfit(sizes: Mapping[str, int], world_size: int) -> str | None:
    """Say why sizes do not divide a world, and which would; None if they do.

    >>> misfit({"tp": 2, "pp": 4}, 16)
    >>> misfit({"tp": 2, "pp": 3}, 16).partition("; ")[0]
    'tp=2 * pp=3 = 6 does not divide the world of 16 ranks'
    """
    product = math.prod(sizes.values())
    if world_size % product == 0:
        return None
    fitting = [
        f"{name} of {nearest_divisors(world_size // (product // size), size)}"
        for name, size in sizes.items()
        if world_size % (product // size) == 0
    ]
    worlds = f"a world of {nearest_multiples(world_size, product).replace('and', 'or')} ranks"
    return (
        f"{as_factors(sizes)} = {product} does not divide the world of {world_size} ranks; "
        f"what would do: {', or '.join([*fitting, worlds])}"
    )
