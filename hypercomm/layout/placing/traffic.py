"""Traffic: the bytes that each rank sends in a step over some dims, and to whom of its group."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Literal

import attrs
import numpy as np

from hypercomm.errors import LayoutError, NotationError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_flag, as_tuple, check_choice
from hypercomm.layout.parsing import Dims, as_dims
from hypercomm.layout.text import shown
from hypercomm.topology.names import ARGUMENTS, Names

Pattern = Literal["ring", "chain", "all-to-all"]
PATTERNS: tuple[Pattern, ...] = ("ring", "chain", "all-to-all")

_LARGEST = 2**60
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_EXAMPLE = "write bytes for each dim like 'tp=40G,dp+cp=6.5G'"

_USUAL = {"tp": 10**12, "ep": 10**9, "cp": 10**9, "pp": 10**6, "dp": 1}


def pattern_of(dims: Iterable[str]) -> Pattern:
    """Return how groups over some dims communicate: pp in a chain, ep with all, else in a ring.

    Example:
        >>> pattern_of(["pp"]), pattern_of(["ep"]), pattern_of(["dp", "cp"])
        ('chain', 'all-to-all', 'ring')
    """
    kinds = {kind_of(dim) for dim in dims}
    return "chain" if kinds == {"pp"} else "all-to-all" if kinds == {"ep"} else "ring"


def kind_of(dim: str) -> str:
    """Return which of the usual dims a name is like; "" where it is like none.

    Example:
        >>> kind_of("dp_replicate"), kind_of("expt_dp"), kind_of("fsdp"), kind_of("x")
        ('dp', 'dp', 'dp', '')
    """
    words = re.split(r"[^a-z]+", dim.lower())
    known = [word for word in words if word in _USUAL]
    alike = {"fsdp": "dp", "ddp": "dp", "hsdp": "dp", "data": "dp", "tensor": "tp", "sp": "cp"}
    alike |= {"pipe": "pp", "pipeline": "pp", "expert": "ep", "context": "cp", "model": "tp"}
    alike |= {"edp": "dp", "etp": "tp"}
    return known[-1] if known else next((alike[word] for word in words if word in alike), "")


@attrs.frozen
class Traffic:
    """What groups over some dims send in a step.

    Args:
        bytes: What each rank sends; in a chain, what goes over each edge, both ways together.
        pattern: To whom: "ring", the next one; "chain", as a ring that is not closed;
            "all-to-all", all others alike.
        overlapped: Whether it goes on beside the computation, so that no step waits for it.
        more: What else the same groups send, in another pattern, or beside the computation.

    Raises:
        LayoutError: The bytes are no number of 0 or more, the pattern is none of these, or more
            holds what is no Traffic.

    Example:
        >>> Traffic(4e9).bytes, Traffic(1, "chain").pattern
        (4000000000, 'chain')
    """

    bytes: int = attrs.field()
    pattern: Pattern = "ring"
    overlapped: bool = False
    more: tuple[Traffic, ...] = ()

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "bytes", _as_bytes(self.bytes, "bytes"))
        object.__setattr__(self, "overlapped", as_flag(self.overlapped, "overlapped"))
        check_choice("pattern", self.pattern, PATTERNS, LayoutError)
        object.__setattr__(self, "more", as_tuple(self.more, "more"))
        for one in self.more:
            if not isinstance(one, Traffic):
                raise LayoutError(f"more must hold Traffic, got {shown(one)}")

    @property
    def parts(self) -> tuple[Traffic, ...]:
        """This alone, and all more of it, of which each has one pattern.

        Example:
            >>> [part.pattern for part in Traffic(8, "all-to-all", more=(Traffic(2),)).parts]
            ['all-to-all', 'ring']
        """
        rest = [part for one in self.more for part in one.parts]
        return (attrs.evolve(self, more=()) if rest else self, *rest)


def _as_bytes(value: object, what: str) -> int:
    number = as_number(value)
    if number is None or not 0 <= number <= _LARGEST:
        least = "a number of bytes, 0 or more" + (", and up to 2**60" if _is_large(number) else "")
        raise LayoutError(f"{what} must be {least}, got {shown(value)}")
    return round(number)


def _is_large(number: float | None) -> bool:
    return number is not None and number > _LARGEST


def as_number(value: object) -> int | float | None:
    """Return a number of Python or numpy as one of Python; of anything else None.

    Example:
        >>> as_number(np.int64(3)), as_number(2.5), as_number(True), as_number("3")
        (3, 2.5, None, None)
    """
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def as_amount(text: str, units: Mapping[str, int] = _UNITS) -> int | float | None:
    """Read a number with a unit, exactly; None where it is none.

    Args:
        text: As "6.5G" or "1e3".
        units: What letters stand for.

    Example:
        >>> as_amount("6.5G"), as_amount("2.5"), as_amount("G")
        (6500000000, 2.5, None)
    """
    letters = "".join(unit for unit in units if unit)
    found = re.fullmatch(
        rf"([0-9]{{1,4000}}(?:\.[0-9]{{1,99}})?(?:e[0-9]{{1,2}})?)([{letters}]?)", text
    )
    if found is None:
        return None
    amount = Fraction(found[1]) * units[found[2]]
    # No float is as large as what 400 digits may say.
    return int(amount) if amount.denominator == 1 or amount > _LARGEST else float(amount)


Given = str | Mapping[str, "int | float | Traffic"]
"""Traffic as text, or by dims."""


def read_traffic(
    given: Given,
    layout: RankLayout,
    overlapped: str | Iterable[Dims] = (),
    names: Names = ARGUMENTS,
) -> dict[tuple[str, ...], Traffic]:
    """Read what is said of the traffic of a layout's dims.

    Args:
        given: Bytes for each rank and step, as "tp=40G,dp+cp=6.5G", or by dims.
        layout: The layout.
        overlapped: Dims whose traffic goes on beside the computation.
        names: What errors call arguments.

    Raises:
        NotationError: The text cannot be read.
        LayoutError: A dim is unknown, dims come twice, or a number is none.

    Example:
        >>> from hypercomm import RankLayout
        >>> found = read_traffic("tp=4k,pp=0.5M", RankLayout.parse("tp=2,pp=2"))[("pp",)]
        >>> found.bytes, found.pattern
        (500000, 'chain')
    """
    by_dims = _parse(given) if isinstance(given, str) else given
    if not isinstance(by_dims, Mapping) or not by_dims:
        raise LayoutError(f"traffic must give bytes by dims; {_EXAMPLE}, got {shown(given)}")
    hidden = [layout.order_dims(dims) for dims in as_items(overlapped, names["overlapped"])]
    found: dict[tuple[str, ...], Traffic] = {}
    for name, said in by_dims.items():
        dims = layout.order_dims(as_dims(name))
        if dims in found:
            raise LayoutError(f"the traffic of {'+'.join(dims)} is given twice")
        if isinstance(said, Traffic):
            found[dims] = said
        else:
            count = _as_bytes(said, f"the traffic of {name!r}")
            found[dims] = Traffic(count, pattern_of(dims), dims in hidden)
    unknown = [dims for dims in hidden if dims not in found]
    if unknown:
        raise LayoutError(
            f"{names['overlapped']} names {'+'.join(unknown[0])}, whose traffic is not given; "
            f"there is {', '.join('+'.join(dims) for dims in found)}"
        )
    return found


def as_items(value: str | Iterable[Dims], what: str) -> tuple[Dims, ...]:
    """Read one set of dims, or several: "dp", "dp+cp,tp", ["dp"].

    Example:
        >>> as_items("dp+cp,tp", "groups"), as_items(["dp"], "groups"), as_items((), "groups")
        (('dp+cp', 'tp'), ('dp',), ())
    """
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    return as_tuple(value, what)


def _parse(text: str) -> dict[str, int | float]:
    found: dict[str, int | float] = {}
    for part in text.split(","):
        name, _, count = (piece.strip() for piece in part.partition("="))
        amount = as_amount(count.removesuffix("B"))
        if amount is None or not name:
            raise NotationError(f"{part!r} in the traffic {shown(text)} cannot be read; {_EXAMPLE}")
        if name in found:
            raise NotationError(f"the traffic of {name!r} is given twice in {shown(text)}")
        found[name] = amount
    return found


def usual_traffic(layout: RankLayout) -> dict[tuple[str, ...], Traffic]:
    """Return traffic that only says which dims matter more: tp, then cp and ep, then pp, then dp.

    Source: Llama 3, section 3.3.2, https://arxiv.org/abs/2407.21783: its order of dims.

    Example:
        >>> from hypercomm import RankLayout
        >>> [traffic.bytes for traffic in usual_traffic(RankLayout.parse("dp=2,tp=2")).values()]
        [1, 1000000000000]
    """
    return {
        (dim,): Traffic(_USUAL.get(kind_of(dim), 1), pattern_of([dim]))
        for dim in layout.dim_names
        if layout.size_of(dim) > 1
    }


def in_bytes(count: int) -> str:
    """Write a number of bytes shortly.

    Example:
        >>> in_bytes(0), in_bytes(999), in_bytes(3_660_000_000)
        ('0', '999 B', '3.66 GB')
    """
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}" if count else "0"
        amount /= 1000
    return f"{amount:,.3g} TB" if amount < 1000 else f"{amount:,.0f} TB"
