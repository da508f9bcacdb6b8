"""Cards: what is known of a model, and the bytes that follow from it, with the sources of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_flag, as_int, check_choice, positive
from hypercomm.layout.placing.traffic import Pattern, Traffic, kind_of
from hypercomm.layout.text import did_you_mean, shown

DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""The bytes of an element."""

_KINDS = ("tp", "cp", "ep", "pp", "dp")
_PATTERNS: dict[str, Pattern] = {"pp": "chain", "ep": "all-to-all"}


@attrs.frozen(kw_only=True)
class Card:
    """What is known of a model and its training; `traffic(layout)` are the bytes that follow.

    Args:
        hidden: The width of the model.
        layers: The number of its layers.
        sequence: The tokens of a sequence.
        micro_batches: How many micro batches a pipeline takes in a step.
        parameters: Of the whole model; those of all experts included.
        micro_batch_size: The sequences of a micro batch.
        experts: The number of experts of a layer; 0: the model has none.
        topk: How many experts each token goes to.
        expert_parameters: How many of the parameters are the experts'.
        key_value_hidden: The width of keys, and of values, where it is not the model's.
        dtype: What activations and parameters are sent in: "fp32", "bf16", "fp16" or "fp8".
        gradient_dtype: What gradients are sent in.
        overlap: Whether gradients and parameters go on beside the computation, as in Megatron's
            --overlap-grad-reduce and in FSDP.

    Raises:
        LayoutError: A number is no int of 1 or more, a dtype is none of these, or what is said of
            experts does not fit together.

    Example:
        >>> from hypercomm import RankLayout
        >>> sizes = {"hidden": 4096, "layers": 32, "sequence": 8192}
        >>> card = Card(**sizes, micro_batches=8, parameters=7 * 10**9)
        >>> found = card.traffic(RankLayout.parse("tp=8,dp=4,pp=2"))
        >>> {"+".join(dims): traffic.bytes for dims, traffic in found.items()}
        {'tp': 60129542144, 'pp': 134217728, 'dp': 1968750000}
    """

    hidden: int = attrs.field()
    layers: int = attrs.field()
    sequence: int = attrs.field()
    micro_batches: int = attrs.field()
    parameters: int = attrs.field()
    micro_batch_size: int = 1
    experts: int = 0
    topk: int = 1
    expert_parameters: int = 0
    key_value_hidden: int | None = None
    dtype: str = "bf16"
    gradient_dtype: str = "fp32"
    overlap: bool = True

    def __attrs_post_init__(self) -> None:
        needed = ("hidden", "layers", "sequence", "micro_batches", "parameters", "topk")
        for name in (*needed, "micro_batch_size"):
            object.__setattr__(self, name, positive(getattr(self, name), f"{name} of a card"))
        for name in ("experts", "expert_parameters"):
            count = as_int(getattr(self, name), f"{name} of a card")
            if count < 0:
                raise LayoutError(f"{name} of a card must be 0 or more, got {count}")
            object.__setattr__(self, name, count)
        if self.key_value_hidden is not None:
            width = positive(self.key_value_hidden, "key_value_hidden of a card")
            object.__setattr__(self, "key_value_hidden", width)
        for name in ("dtype", "gradient_dtype"):
            check_choice(f"{name} of a card", getattr(self, name), tuple(DTYPES), LayoutError)
        object.__setattr__(self, "overlap", as_flag(self.overlap, "overlap of a card"))
        if bool(self.experts) != bool(self.expert_parameters):
            raise LayoutError(
                f"a card with experts gives expert_parameters, too, and without experts neither; "
                f"got experts={self.experts}, expert_parameters={self.expert_parameters}"
            )
        if self.experts and self.topk > self.experts:
            raise LayoutError(f"topk {self.topk} is more than there are experts, {self.experts}")
        if self.expert_parameters > self.parameters:
            raise LayoutError(
                f"expert_parameters {self.expert_parameters} are more than all parameters, "
                f"{self.parameters}"
            )

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Card:
        """Make a card of what a file holds.

        Args:
            fields: By name.

        Raises:
            LayoutError: A name is none of a card's, or one is missing; says which.

        Example:
            >>> fields = {"hidden": 8, "layers": 2, "sequence": 4, "micro_batches": 1}
            >>> Card.read(fields | {"parameters": 100}).dtype
            'bf16'
        """
        known = [field.name for field in attrs.fields(cls)]
        if not isinstance(fields, Mapping):
            raise LayoutError(f"a card gives {known} by name, got {shown(fields)}")
        for name in fields:
            if name not in known:
                raise LayoutError(
                    f"a card has no {shown(name)}, but {known}{did_you_mean(name, known)}"
                )
        needed = [field.name for field in attrs.fields(cls) if field.default is attrs.NOTHING]
        missing = [name for name in needed if name not in fields]
        if missing:
            raise LayoutError(f"a card needs {', '.join(missing)}, too")
        whole: dict[str, Any] = {  # JSON has one kind of number: 7e9 is an int
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in fields.items()
        }
        return cls(**whole)

    def traffic(self, layout: RankLayout) -> dict[tuple[str, ...], Traffic]:
        """Return what each rank sends in a step over the dims tp, cp, ep, pp and dp of a layout.

        With b sequences in a micro batch, s tokens of each on a rank (the sequence over cp), width
        h, m micro batches and L = layers over pp, in elements for each rank:

        - tp: 8 b s h (tp - 1)/tp for each layer and micro batch: four all-reduces.
        - pp: 2 b s h for each micro batch over each edge, forward and back; over tp, as sequence
          parallelism leaves each rank a part. Megatron, https://arxiv.org/abs/2104.04473, 3.2.
        - cp: keys and values go round (cp - 1) times, and in the backward pass they and their
          gradients: 6 b s k (cp - 1) for each layer and micro batch, k the width of keys, over tp.
          Ring attention, https://arxiv.org/abs/2310.01889, 3.
        - ep: four all-to-alls of b s h topk for each layer and micro batch, of which (ep - 1)/ep
          leave the rank; over tp. GShard, https://arxiv.org/abs/2006.16668, 3.2.
        - dp, with cp and ep for what is no expert's: a reduce-scatter of gradients and an
          all-gather of parameters, (n - 1)/n of each. ZeRO, https://arxiv.org/abs/1910.02054, 7.

        A dim counts as what its name is like, so dp_shard as dp. Nothing waits for the last of
        these where `overlap` is on, over whichever dims they go.

        Raises:
            LayoutError: A dim is like none of these, or ep does not divide the experts that
                there are.

        Example:
            >>> from hypercomm import RankLayout
            >>> card = Card(hidden=8, layers=2, sequence=4, micro_batches=3, parameters=100)
            >>> card.traffic(RankLayout.parse("tp=2"))[("tp",)].bytes  # 3 * 2 * 8*4*8 / 2 * 2 bytes
            1536
        """
        if not isinstance(layout, RankLayout):
            raise LayoutError(f"layout must be a RankLayout, got {shown(layout)}")
        dims = _dims_by_kind(layout)
        size = {kind: layout.size_of(dims[kind]) if dims[kind] else 1 for kind in _KINDS}
        tp, cp, ep = size["tp"], size["cp"], size["ep"]
        if ep > 1 and (not self.experts or self.experts % ep):
            raise LayoutError(
                f"{layout} spreads experts over {ep} ranks, but the card has {self.experts}; give "
                f"experts, and as many as {ep} divides"
            )
        element, each = DTYPES[self.dtype], self.micro_batches * self.layers / size["pp"]
        tokens = self.micro_batch_size * self.sequence / cp
        width = self.key_value_hidden or self.hidden
        sent = {
            "tp": each * 8 * tokens * self.hidden * (tp - 1) / tp * element,
            "cp": each * 6 * tokens * width / tp * (cp - 1) * element,
            "ep": each * 4 * tokens * self.hidden * self.topk / tp * (ep - 1) / ep * element,
            "pp": self.micro_batches * 2 * tokens * self.hidden / tp * element,
        }
        if not self.experts:
            del sent["ep"]
        found = {}
        for kind, count in sent.items():
            if size[kind] > 1:
                found[layout.order_dims(dims[kind])] = Traffic(
                    round(count), _PATTERNS.get(kind, "ring")
                )
        for over, count in self._gradients(size).items():
            names = layout.order_dims([dim for kind in over for dim in dims[kind]])
            mine = Traffic(round(count), "ring", self.overlap)
            known = found.get(names)
            found[names] = attrs.evolve(known, more=(mine,)) if known else mine
        return found

    def _gradients(self, size: Mapping[str, int]) -> dict[tuple[str, ...], float]:
        """The bytes of gradients and parameters, by the kinds of dims that they go over."""
        both = DTYPES[self.dtype] + DTYPES[self.gradient_dtype]
        parts = size["tp"] * size["pp"]
        found: dict[tuple[str, ...], float] = {}
        for kinds, parameters in (
            (("cp", "dp", "ep"), (self.parameters - self.expert_parameters) / parts),
            (("cp", "dp"), self.expert_parameters / (parts * size["ep"])),
        ):
            wide = tuple(kind for kind in kinds if size[kind] > 1)
            ranks = math.prod(size[kind] for kind in wide)
            if wide and parameters:
                found[wide] = found.get(wide, 0) + (ranks - 1) / ranks * parameters * both
        return found


def _dims_by_kind(layout: RankLayout) -> dict[str, tuple[str, ...]]:
    """The dims larger than 1 of each kind; raise where a dim is of none."""
    found: dict[str, tuple[str, ...]] = dict.fromkeys(_KINDS, ())
    for dim in layout.dim_names:
        if layout.size_of(dim) == 1:
            continue
        kind = kind_of(dim)
        if kind not in found:
            raise LayoutError(
                f"a card speaks of the dims {list(_KINDS)}, and not of {dim!r} of {layout}; give "
                f"the traffic instead"
            )
        found[kind] = (*found[kind], dim)
    return found
