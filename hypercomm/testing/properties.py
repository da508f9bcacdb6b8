"""Ready properties of layers: equal to the dense layer, and the right random numbers.

Every rank of the grid calls these functions, in a test marked `@pytest.mark.ranks(4)` or in a
function for `run_ranks`. If a property does not hold on one rank, all of them raise.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from hypercomm.errors import LayoutError
from hypercomm.grid.view import GridView
from hypercomm.layout.checks import check_choice
from hypercomm.layout.parsing import Dims
from hypercomm.layout.text import format_coords

Function = Callable[..., Any]


class PropertyError(AssertionError):
    """A property does not hold; all ranks raise it, with the same causes.

    Attributes:
        causes: The cause of each difference, by rank and tensor, such as `(1, "output")` or
            `(1, "gradient of weight")`: a mistake that gives exactly these values, or "" if none
            is known.
    """

    def __init__(self, text: str, causes: Mapping[tuple[int, str], str]) -> None:
        super().__init__(text)
        self.causes = causes


# ---- the properties -----------------------------------------------------------------------------


def layer(
    grid: GridView,
    dim: Dims,
    sharded: Function,
    dense: Function,
    tensors: Mapping[str, Sequence[int] | Tensor],
    *,
    cuts: Mapping[str, int | None],
    finish: Callable[[], object] = lambda: None,
    zigzag: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Check that a sharded layer equals a dense one: the output, and the gradient of each tensor.

    Whole tensors are drawn, the same on all ranks. Each rank gets its part of those that are cut
    along `dim`, and all of the others. Ranks that differ only in other dims get the same. The
    backward pass starts with the rank's part of one gradient of the output. Each gradient must be
    the rank's part of the dense one, or all of it if the tensor is not cut.

    Args:
        grid: The grid.
        dim: The dims along which tensors are cut.
        sharded: Takes the rank's parts by position, in the order of `tensors`, and returns its part
            of the output, or a tuple that begins with it. If it is a module, its parameters of
            these names are set, and it takes the other tensors. Parameters and outputs may be
            DTensors, as those of `parallelize_module`.
        dense: As `sharded`, for the whole tensors. If it is a module, its parameters are among
            them, after `tensors`.
        tensors: The shape of each tensor that is drawn from a normal distribution, or a tensor that
            is the same on all ranks.
        cuts: The axis of each tensor that is cut, by name, and of "output". An output without axes,
            such as a loss, for which it has one, is a share of the dense one, and not compared.
        finish: Called after the backward pass, to complete the gradients of a sharded module, such
            as to sum those of replicated parameters.
        zigzag: Whether each position along `dim` has two chunks: `i` has the chunks `i` and
            `2 * size - 1 - i`, as in Megatron's and torch's balanced context parallelism.
        dtype: Of the tensors that are drawn.
        device: Of all tensors.
        rtol: As for `torch.testing.assert_close`, together with `atol`; default: as there.
        atol: As `rtol`.

    Raises:
        PropertyError: A rank differs. It is an AssertionError.
        LayoutError: A parameter has another shape than its part of the dense one.
        UnknownDimError: The grid has no such dim.
        RankOutsideError: The calling rank is not in the grid.

    Example:
        A LayerNorm of a sequence-parallel model: each rank has some rows of the input, so the
        gradients of the weight and the bias must be summed.

        >>> import torch
        >>> from hypercomm import HyperCommGrid, run_ranks
        >>> from hypercomm.testing import properties
        >>> def test():
        ...     with HyperCommGrid("tp=2") as grid:
        ...         norm, dense = torch.nn.LayerNorm(6), torch.nn.LayerNorm(6)
        ...         def finish():
        ...             for parameter in norm.parameters():
        ...                 parameter.grad = grid["tp"].sum(parameter.grad)
        ...         rows = {"x": 0, "output": 0}
        ...         properties.layer(
        ...             grid, "tp", norm, dense, {"x": (4, 6)}, cuts=rows, finish=finish
        ...         )
        >>> run_ranks(test, 2)
        [None, None]
    """
    ranks = _Comparison(grid, dim, cuts, zigzag, {"rtol": rtol, "atol": atol})
    random = torch.Generator().manual_seed(0)

    def drawn(given: Sequence[int] | Tensor) -> Tensor:
        if isinstance(given, Tensor):
            return given.to(device)
        numbers = torch.randn(tuple(given), generator=random, dtype=torch.float64)
        return numbers.to(device, dtype)

    shapes = {name: parameter.shape for name, parameter in _parameters(dense).items()}
    wholes = {name: drawn(given) for name, given in {**tensors, **shapes}.items()}
    unknown = cuts.keys() - {*wholes, "output"}
    if unknown:
        raise LayoutError(
            f"cuts names {sorted(unknown)}, but the tensors are {[*wholes]} and output"
        )
    leaves, expected = _call(dense, wholes)
    start = drawn(expected.shape)
    torch.autograd.backward(expected, start)
    wanted = _gradients(leaves)
    at = grid[dim].rank
    parts = {name: ranks.part(name, whole, at) for name, whole in wholes.items()}
    leaves, result = _call(sharded, parts)
    if expected.ndim or cuts.get("output") is None:
        ranks.compare({"output": expected}, {"output": result})
    torch.autograd.backward(result, ranks.part("output", start, at).to(result.dtype))
    finish()
    ranks.compare(wanted, _gradients(leaves))


def linear(
    grid: GridView,
    dim: Dims,
    sharded: Function,
    cut: Literal["column", "row"],
    *,
    features: tuple[int, int] | None = None,
    bias: bool = True,
    sequence: int | None = None,
    **options: Any,
) -> None:
    """Check that a tensor-parallel linear layer equals `torch.nn.functional.linear`.

    The weight has the shape (features out, features in). "column" cuts the features out: of the
    weight, the bias and the output. "row" cuts the features in: of the weight and the input.

    Args:
        grid: The grid.
        dim: The dims along which the weight is cut, such as "tp".
        sharded: Takes the rank's parts of the input, the weight and the bias, or is a module with
            the parameters `weight` and `bias` that takes the input; as for `layer`. The input has
            three axes, the last one has the features.
        cut: "column" or "row".
        features: Features in and out of the whole layer; default: 4 and 6 for each position.
        bias: Whether there is a bias.
        sequence: The axis of tokens, 0 or 1, that sequence parallelism cuts: of the input of a
            "column" layer, of the output of a "row" layer. None: it is whole.
        options: As for `layer`: `finish`, `zigzag`, `dtype`, `device`, `rtol` and `atol`.

    Raises:
        PropertyError, UnknownDimError, RankOutsideError: As for `layer`.
        LayoutError: As for `layer`, or `cut` is unknown.

    Example:
        >>> import torch
        >>> from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
        >>> from hypercomm import HyperCommGrid, run_ranks
        >>> from hypercomm.testing import properties
        >>> def test():
        ...     with HyperCommGrid("tp=2") as grid:
        ...         own, mesh = torch.nn.Linear(8, 12), grid.device_mesh("tp")
        ...         parallelize_module(own, mesh, RowwiseParallel())
        ...         properties.linear(grid, "tp", own, "row", features=(8, 12))
        >>> run_ranks(test, 2)
        [None, None]
    """
    size = grid[dim].size
    inner, outer = features or (4 * size, 6 * size)
    shapes = {"input": (2 * size, 3 * size, inner), "weight": (outer, inner)}
    if bias:
        shapes["bias"] = (outer,)
    check_choice("cut", cut, ("column", "row"), LayoutError)
    cuts: dict[str, int | None] = {"input": 2, "weight": 1, "output": sequence}
    if cut == "column":
        cuts = {"input": sequence, "weight": 0, "bias": 0, "output": 2}
    cuts = {name: axis for name, axis in cuts.items() if name in {*shapes, "output"}}
    layer(grid, dim, sharded, functional.linear, shapes, cuts=cuts, **options)


def attention(
    grid: GridView,
    dim: Dims,
    sharded: Function,
    *,
    causal: bool = False,
    shape: Sequence[int] | None = None,
    **options: Any,
) -> None:
    """Check that context-parallel attention equals `scaled_dot_product_attention`.

    Queries, keys, values and the output have the shape (batch, heads, tokens, width), and each
    rank has some of the tokens of all four.

    Args:
        grid: The grid.
        dim: The dims along which tokens are cut, such as "cp".
        sharded: Takes the rank's queries, keys and values, and returns its output; as for `layer`.
        causal: Whether a token attends only to itself and to the tokens before it.
        shape: Default: (2, 2 heads for each position, 4 tokens for each position, 8).
        options: As for `layer`, such as `zigzag`.

    Raises:
        PropertyError, UnknownDimError, RankOutsideError: As for `layer`.

    Example:
        DeepSpeed's Ulysses: ranks exchange tokens for heads, and back.

        >>> from torch.distributed.tensor import DTensor, Shard
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> from hypercomm import HyperCommGrid, run_ranks
        >>> from hypercomm.testing import properties
        >>> def test():
        ...     with HyperCommGrid("cp=2") as grid:
        ...         mesh = grid.device_mesh("cp")
        ...         def exchange(part, before, after):
        ...             tensor = DTensor.from_local(part, mesh, [Shard(before)])
        ...             return tensor.redistribute(placements=[Shard(after)]).to_local()
        ...         def ulysses(*parts):
        ...             own = [exchange(part, 2, 1) for part in parts]
        ...             return exchange(scaled_dot_product_attention(*own, is_causal=True), 1, 2)
        ...         properties.attention(grid, "cp", ulysses, causal=True)
        >>> run_ranks(test, 2)
        [None, None]
    """
    size = grid[dim].size
    shapes = dict.fromkeys(["query", "key", "value"], shape or (2, 2 * size, 4 * size, 8))
    dense = functools.partial(functional.scaled_dot_product_attention, is_causal=causal)
    cuts = dict.fromkeys([*shapes, "output"], 2)
    layer(grid, dim, sharded, dense, shapes, cuts=cuts, **options)


def loss(
    grid: GridView,
    dim: Dims,
    sharded: Function,
    cut: Literal["vocabulary", "tokens"],
    *,
    dense: Function = functional.cross_entropy,
    shape: tuple[int, int] | None = None,
    padded: bool = False,
    **options: Any,
) -> None:
    """Check that a sharded loss and the gradient of its logits equal those of the dense loss.

    Args:
        grid: The grid.
        dim: The dims along which the logits are cut.
        sharded: Takes the rank's logits of the shape (tokens, vocabulary), and the targets, and
            returns the loss.
        cut: "vocabulary": each rank has all targets, and returns the dense loss. "tokens": each has
            its own targets; the loss may be its share or that of all, so only gradients of a loss
            without axes are compared. If gradients are averaged along `dim` afterwards, as by
            DistributedDataParallel and FSDP, let it divide by the size of `dim`.
        dense: The loss of all logits and targets.
        shape: Tokens and vocabulary; default: 4 and 5 for each position.
        padded: Whether every third target is -100, whose loss does not count: ranks have different
            numbers of tokens that count.
        options: As for `layer`.

    Raises:
        PropertyError, UnknownDimError, RankOutsideError: As for `layer`.
        LayoutError: `cut` is unknown.

    Example:
        Each rank has the mean of its own tokens, and its gradients are averaged afterwards.

        >>> from torch.nn.functional import cross_entropy
        >>> from hypercomm import HyperCommGrid, run_ranks
        >>> from hypercomm.testing import properties
        >>> def test():
        ...     with HyperCommGrid("dp=2") as grid:
        ...         def mean(logits, targets):
        ...             return cross_entropy(logits, targets) / grid["dp"].size
        ...         properties.loss(grid, "dp", mean, "tokens")
        >>> run_ranks(test, 2)
        [None, None]
    """
    size = grid[dim].size
    tokens, vocabulary = shape or (4 * size, 5 * size)
    targets = torch.arange(tokens) * 7 % vocabulary
    if padded:
        targets[::3] = -100
    tensors: dict[str, Any] = {"logits": (tokens, vocabulary), "targets": targets}
    check_choice("cut", cut, ("vocabulary", "tokens"), LayoutError)
    cuts = {"logits": 0, "targets": 0, "output": 0} if cut == "tokens" else {"logits": 1}
    layer(grid, dim, sharded, dense, tensors, cuts=cuts, **options)


def random_state(grid: GridView, draw: Callable[[], Any], same: Dims = ()) -> None:
    """Check that ranks draw the same random numbers along some dims, and different ones otherwise.

    Args:
        grid: The grid.
        draw: Returns a tensor of random numbers, such as `lambda: dropout(torch.ones(64))`: enough
            numbers that two states do not give the same by chance.
        same: The dims along which ranks must draw the same, such as "tp" for the dropout of an
            activation that is not cut. Ranks that differ in any other dim must draw different
            numbers.

    Raises:
        PropertyError: Two ranks draw different numbers, or the same, and must not; names both.
        UnknownDimError: The grid has no such dim.
        RankOutsideError: The calling rank is not in the grid.

    Example:
        >>> import torch
        >>> from hypercomm import HyperCommGrid, run_ranks
        >>> from hypercomm.testing import properties
        >>> def test():
        ...     with HyperCommGrid("tp=2,dp=1") as grid:
        ...         torch.manual_seed(grid.seed(1234, "dp"))
        ...         properties.random_state(grid, lambda: torch.rand(8), same="tp")
        >>> run_ranks(test, 2)
        [None, None]
    """
    equal = grid.layout.order_dims(same) if same else ()
    others = [dim for dim in grid.dim_names if dim not in equal]
    drawn = _gather(grid, torch.as_tensor(draw()).detach().cpu())
    for rank, other in itertools.combinations(drawn, 2):
        one, two = grid.coords(rank), grid.coords(other)
        differ = any(one[dim] != two[dim] for dim in others)
        if differ == torch.equal(drawn[rank], drawn[other]):
            cause = f"must draw {'different' if differ else 'the same'} numbers"
            raise PropertyError(
                f"ranks {rank} ({format_coords(one)}) and {other} ({format_coords(two)}) {cause}: "
                f"same={equal}; a seed that differs along the other dims is grid.seed(1, {others})",
                {(rank, "draw"): cause, (other, "draw"): cause},
            )


# ---- the comparison -----------------------------------------------------------------------------


@attrs.frozen
class _Comparison:
    """Compares what ranks have with their parts of dense tensors; attributes as for `layer`."""

    grid: GridView
    dim: Dims
    cuts: Mapping[str, int | None]
    zigzag: bool
    tolerance: Mapping[str, Any]

    def part(self, name: str, whole: Tensor, at: int) -> Tensor:
        """Return the part of a whole tensor for a position along the dims."""
        axis, size = self.cuts.get(name.removeprefix("gradient of ")), self.grid[self.dim].size
        if axis is None or whole.ndim == 0:
            return whole
        if not self.zigzag:
            return whole.tensor_split(size, axis)[at]
        chunks = whole.tensor_split(2 * size, axis)
        return torch.cat([chunks[at], chunks[-1 - at]], axis)

    def difference(self, mine: Tensor, part: Tensor) -> str:
        """Return how two tensors differ, and where the most; "" if they are close."""
        try:
            torch.testing.assert_close(mine, part, check_dtype=False, **self.tolerance)
        except AssertionError as error:
            return str(error).rpartition("\n\n")[2]
        return ""

    def compare(self, wholes: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Raise on all ranks if what a rank has is not its part of the whole tensors."""
        waited = {name: each.detach().clone().cpu() for name, each in own.items()}
        found = _gather(self.grid, waited)  # a clone waits for a functional collective
        texts, causes = [], {}
        for (name, whole), rank in itertools.product(wholes.items(), found):
            members = self.grid.group_ranks(self.dim, rank)
            at, group = members.index(rank), [found[member][name] for member in members]
            parts = [self.part(name, whole.detach().cpu(), each) for each in range(len(members))]
            difference = self.difference(group[at], parts[at])
            if difference:
                cause = causes[rank, name] = self.cause(group, parts, at)
                where = f"{name} of rank {rank} ({format_coords(self.grid.coords(rank))})"
                where += " differs from the dense one" + (f": {cause}" if cause else "")
                texts.append(f"{where}\n{difference}")
        if causes:
            raise PropertyError("\n\n".join(texts), causes)

    def cause(self, group: list[Tensor], parts: list[Tensor], at: int) -> str:
        """Return the mistake that gives exactly what a rank has; "" if none is known.

        Args:
            group: The tensor of each member of the rank's group.
            parts: The dense part of each.
            at: The position of the rank among them.
        """
        mine, part = group[at], parts[at]
        known = {f"it is the part of position {other}": each for other, each in enumerate(parts)}
        known["it is zero"] = torch.zeros_like(part)
        others = (each for each in group if each is not mine and each.shape == part.shape)
        known[f"an all-reduce over {self.dim} is missing: the sum is right"] = part - sum(others)
        for dim in (self.dim, *self.grid.dim_names):
            size = self.grid[dim].size
            known[f"scaled by {size}, the size of {dim}: summed once too often"] = part * size
            known[f"scaled by 1/{size}: divided by the size of {dim} once too often"] = part / size
        return next((text for text in known if not self.difference(mine, known[text])), "")


def _parameters(function: Function) -> dict[str, nn.Parameter]:
    return dict(function.named_parameters()) if isinstance(function, nn.Module) else {}


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _call(function: Function, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Call a function with tensors, or a module of which some tensors become parameters.

    Returns:
        The leaves of autograd by name, and the output.
    """
    own, leaves = _parameters(function), {}
    for name, value in tensors.items():
        leaf = leaves[name] = own.get(name, value.clone())
        if leaf.is_floating_point():
            leaf.requires_grad_().grad = torch.zeros_like(leaf)
        local = _local(leaf.detach())
        if local.shape != value.shape:
            raise LayoutError(
                f"the parameter {name!r} has the shape {tuple(local.shape)}, and its part of the "
                f"dense one {tuple(value.shape)}: give the shapes of the dense layer"
            )
        local.copy_(value)
    result = function(*(leaf for name, leaf in leaves.items() if name not in own))
    return leaves, _local(result[0] if isinstance(result, tuple) else result)


def _gradients(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of leaves by their titles."""
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {f"gradient of {name}": _local(grad) for name, grad in grads.items()}


def _gather(grid: GridView, value: Any) -> dict[int, Any]:
    """Return the value of each rank of the grid, by rank."""
    everyone = grid[grid.dim_names]
    gathered: list[Any] = [None] * everyone.size
    dist.all_gather_object(gathered, (everyone.ranks[everyone.rank], value), group=everyone.group)
    return dict(sorted(gathered))
