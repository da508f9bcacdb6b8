"""The traffic of a training step: the bytes that each rank sends, by dims."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Literal, TypeVar

import attrs

from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import check_choice
from hypercomm.layout.text import short_repr
from hypercomm.layout.views import Views

Dims = tuple[str, ...]
Pattern = Literal["ring", "chain", "all-to-all"]
Amount = TypeVar("Amount")

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)([kMGT]?)B?")
_USUAL = {"tp": 10**12, "ep": 10**9, "cp": 10**9, "pp": 10**6, "dp": 1}
_KINDS = {
    "dp": ("dp", "fsdp", "ddp", "hsdp", "data", "edp"),
    "tp": ("tp", "tensor", "model", "etp"),
    "cp": ("cp", "sp", "context"),
    "ep": ("ep", "expert"),
    "pp": ("pp", "pipe", "pipeline"),
}


def kind_of(dim: str) -> str:
    """Return the kind of parallelism that the name of a dim suggests, or "".

    Example:
        >>> kind_of("dp_replicate"), kind_of("expt_dp"), kind_of("fsdp"), kind_of("x")
        ('dp', 'dp', 'dp', '')
    """
    words = re.split(r"[^a-z]+", dim.lower())
    exact = [word for word in words if word in _KINDS][-1:]
    return next((kind for one in exact or words for kind in _KINDS if one in _KINDS[kind]), "")


def pattern_of(dims: Iterable[str]) -> Pattern:
    """Return how groups over some dims usually communicate.

    Example:
        >>> pattern_of(["pp"]), pattern_of(["ep"]), pattern_of(["dp", "cp"])
        ('chain', 'all-to-all', 'ring')
    """
    kinds = {kind_of(dim) for dim in dims}
    return "chain" if kinds == {"pp"} else "all-to-all" if kinds == {"ep"} else "ring"


def _as_bytes(value: float) -> int:
    if not isinstance(value, Real) or not 0 <= value <= 2**60:
        given = short_repr(value)
        raise LayoutError(f"traffic must be from 0 to 2**60 bytes, as in 40e9, got {given}")
    return round(value)


@attrs.frozen
class Traffic:
    """The traffic of the groups over some dims in one step.

    Args:
        bytes: The bytes that each rank sends. For a chain, the bytes between two neighbours, in
            both directions together.
        pattern: "ring", "chain" (a ring that is not closed) or "all-to-all".
        overlapped: Whether the traffic overlaps with computation, so that no step waits for it.

    Raises:
        LayoutError: The bytes are not a number from 0 to 2**60, or the pattern is unknown.

    Example:
        >>> Traffic(4e9).bytes, Traffic(1, "chain").pattern
        (4000000000, 'chain')
    """

    bytes: int = attrs.field(converter=_as_bytes)
    pattern: Pattern = "ring"
    overlapped: bool = False

    def __attrs_post_init__(self) -> None:
        check_choice("pattern", self.pattern, ("ring", "chain", "all-to-all"), LayoutError)


def read_traffic(
    given: str | Mapping[str, float | Traffic],
    layout: RankLayout | Views,
    overlapped: str | Iterable[str] = (),
) -> dict[Dims, Traffic]:
    """Return the traffic of a layout and its views, by dims in the layout's order.

    Args:
        given: The bytes that each rank sends in a step, such as "tp=40G,dp+cp=6.5G", or a mapping
            from dims to bytes.
        layout: The layout, or the layout with its views.
        overlapped: Dims whose traffic overlaps with computation, such as "dp,dp+cp", or a list.

    Raises:
        LayoutError: The text cannot be read, a dim is unknown, dims are given twice, or a value is
            not a number.

    Example:
        >>> from hypercomm import RankLayout
        >>> found = read_traffic("tp=4k,pp=0.5M", RankLayout("tp=2,pp=2"))[("pp",)]
        >>> found.bytes, found.pattern
        (500000, 'chain')
    """
    hidden = read_dims(overlapped, layout)
    found: dict[Dims, Traffic] = {}
    for name, value in read_amounts(given, "traffic", "tp=40G,dp=6.5G").items():
        dims = layout.order_dims(name)
        if dims in found:
            raise LayoutError(f"the traffic of {'+'.join(dims)} is given twice")
        if not isinstance(value, Traffic):
            value = Traffic(value, pattern_of(dims), dims in hidden)  # noqa: PLW2901
        found[dims] = value
    for dims in hidden:
        if dims not in found:
            raise LayoutError(
                f"overlapped= (--overlap) contains {'+'.join(dims)}, whose traffic is not given; "
                f"add it to traffic= (--traffic)"
            )
    return found


def read_dims(text: str | Iterable[str], layout: RankLayout | Views) -> list[Dims]:
    """Return sets of dims, each in the layout's order, from text such as "dp+cp,tp" or a list.

    Example:
        >>> from hypercomm import RankLayout
        >>> read_dims("dp+cp,tp", RankLayout("tp=2,cp=2,dp=2"))
        [('cp', 'dp'), ('tp',)]
    """
    parts = [part.strip() for part in text.split(",")] if isinstance(text, str) else text
    return [layout.order_dims(part) for part in parts if part]


def read_amounts(
    given: str | Mapping[str, Amount], what: str, example: str
) -> Mapping[str, float | Amount]:
    """Return names and numbers from a mapping, or from text such as "tp=40G,dp+cp=6.5G".

    Raises:
        LayoutError: A part cannot be read, or a name is given twice.
    """
    if not isinstance(given, str):
        return given
    found: dict[str, float] = {}
    for part in given.split(",") if given else []:
        name, _, number = (piece.strip() for piece in part.partition("="))
        amount = _AMOUNT.fullmatch(number)
        if not name or amount is None or name in found:
            raise LayoutError(
                f"{short_repr(part)} in {what}= (--{what}) cannot be read; write {example!r}"
            )
        found[name] = float(amount[1]) * _UNITS[amount[2]]
    return found


def usual_traffic(layout: RankLayout) -> dict[Dims, Traffic]:
    """Return assumed traffic. tp has the most, followed by cp and ep, then pp, then dp.

    Source: the order of dims of Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2.

    Example:
        >>> from hypercomm import RankLayout
        >>> [traffic.bytes for traffic in usual_traffic(RankLayout("dp=2,tp=2")).values()]
        [1, 1000000000000]
    """
    return {
        (dim,): Traffic(_USUAL.get(kind_of(dim), 1), pattern_of([dim]))
        for dim in layout.dim_names
        if layout.size_of(dim) > 1
    }


def format_bytes(count: int) -> str:
    """Return a number of bytes as short text.

    Example:
        >>> format_bytes(0), format_bytes(999), format_bytes(3_660_000_000)
        ('0', '999 B', '3.66 GB')
    """
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}" if count else "0"
        amount /= 1000
    return f"{amount:,.3g} TB" if amount < 1000 else f"{amount:,.0f} TB"
