"""Checks that compare sharded layers with dense layers, and random numbers between ranks.

Every rank of the grid must call these functions, in a test marked `@pytest.mark.ranks(4)` or in a
function for `run_ranks`. If a check fails on one rank, all ranks raise.
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
    """A check of this module failed. All ranks raise it, with the same causes.

    Attributes:
        causes: The cause of each difference. The keys are pairs of rank and tensor, such as
            `(1, "output")` or `(1, "gradient of weight")`. A cause is a mistake that leads to
            exactly these values, or "" if no known mistake leads to them.
    """

    def __init__(self, text: str, causes: Mapping[tuple[int, str], str]) -> None:
        super().__init__(text)
        self.causes = causes


# ---- the checks ---------------------------------------------------------------------------------


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
    """Check that a sharded layer computes the same output and gradients as a dense layer.

    All ranks draw the same full tensors. If a tensor is split along `dim`, each rank passes its
    part to the layer. Any other tensor is passed unsharded. Ranks with the same coordinates along
    `dim` pass equal tensors. The backward pass starts with the rank's part of a random gradient of
    the output. Each gradient must equal the rank's part of the dense gradient, or the full dense
    gradient if the tensor is not split.

    Args:
        grid: The grid.
        dim: The dims along which tensors are split.
        sharded: A function that is called with the rank's parts, in the order of `tensors`. The
            function returns the rank's part of the output, or a tuple whose first item is this
            part. If `sharded` is a module, each tensor with the name of a parameter is written into
            that parameter, and the module is called with the other tensors. Parameters and outputs
            may be DTensors, as with `parallelize_module`.
        dense: A function that is called with the full tensors, under the same rules. If `dense` is
            a module, its parameters are drawn after `tensors`.
        tensors: For each name, a tensor that is the same on all ranks, or the shape of a tensor to
            draw from a normal distribution.
        cuts: The axis along which each tensor is split, by name. The name of the output is
            "output". If an axis is given for an output without axes, such as a loss, each rank
            computes only a share of this output, and the output is not compared.
        finish: A function that is called after the backward pass, to complete the gradients of a
            sharded module. For example, the function sums the gradients of replicated parameters.
        zigzag: Whether each position along `dim` has two chunks. Position `i` has the chunks `i`
            and `2 * size - 1 - i`, as in Megatron's and torch's balanced context parallelism.
        dtype: The dtype of the drawn tensors.
        device: The device of all tensors.
        rtol: The relative tolerance, to be given together with `atol`. Default: the tolerance of
            `torch.testing.assert_close`.
        atol: The absolute tolerance.

    Raises:
        PropertyError: A rank has wrong values. The error is an AssertionError.
        LayoutError: The shape of a parameter differs from the shape of the rank's part of the dense
            parameter.
        UnknownDimError: The grid has no such dim.
        RankOutsideError: The calling rank is not in the grid.

    Example:
        In a sequence-parallel LayerNorm, each rank has some rows of the input, so the gradients of
        the weight and the bias must be summed.

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
            f"cuts= contains unknown names {sorted(unknown)}; the tensors are {[*wholes]} and "
            f"'output'"
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

    The weight has the shape (out_features, in_features).

    Args:
        grid: The grid.
        dim: The dims along which the weight is split, such as "tp".
        sharded: A function that is called with the rank's parts of input, weight and bias, or a
            module with the parameters `weight` and `bias`, which is called with the input. The
            input has three axes, and the last one is in_features.
        cut: "column" if the out_features of the weight, the bias and the output are split. "row" if
            the in_features of the weight and the input are split.
        features: in_features and out_features of the full layer. Default: 4 and 6, times the size
            of `dim`.
        bias: Whether there is a bias.
        sequence: The token axis, 0 or 1, that sequence parallelism splits in the input of a
            "column" layer, or in the output of a "row" layer. Default: tokens are not split.
        options: Options of `layer`: `finish`, `zigzag`, `dtype`, `device`, `rtol` and `atol`.

    Raises:
        PropertyError: A rank has wrong values. The error is an AssertionError.
        LayoutError: `cut` is unknown, or the shape of a parameter is wrong, as in `layer`.
        UnknownDimError: The grid has no such dim.
        RankOutsideError: The calling rank is not in the grid.

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

    Queries, keys, values and the output have the shape (batch, heads, tokens, width). All four
    tensors are split along the tokens.

    Args:
        grid: The grid.
        dim: The dims along which tokens are split, such as "cp".
        sharded: A function that returns the rank's output, given the rank's queries, keys and
            values.
        causal: Whether a token attends only to itself and to earlier tokens.
        shape: The shape of the full tensors. Default: (2, 2 * size, 4 * size, 8) with the size of
            `dim`.
        options: Options of `layer`, such as `zigzag`.

    Raises:
        PropertyError: A rank has wrong values. The error is an AssertionError.
        UnknownDimError: The grid has no such dim.
        RankOutsideError: The calling rank is not in the grid.

    Example:
        In DeepSpeed's Ulysses, ranks exchange tokens for heads before attention, and back after it.

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
    """Check the value of a sharded loss, and its gradient with respect to the logits.

    Args:
        grid: The grid.
        dim: The dims along which the logits are split.
        sharded: A function that returns the loss, given the rank's logits of shape
            (tokens, vocabulary) and the targets.
        cut: With "vocabulary", each rank has all targets, and returns the dense loss. With
            "tokens", each rank has the targets of its tokens, and returns its share of the loss or
            the full loss. Therefore, only the gradients of a loss without axes are compared. If
            gradients are averaged along `dim` afterwards, as by DistributedDataParallel and FSDP,
            divide the loss by the size of `dim` in `sharded`.
        dense: A function that returns the loss of all logits and targets.
        shape: The numbers of tokens and of words in the vocabulary. Default: 4 and 5, times the
            size of `dim`.
        padded: Whether every third target is -100, which a loss ignores. As a result, the
            number of targets that count differs between ranks.
        options: Options of `layer`.

    Raises:
        PropertyError: A rank has wrong values. The error is an AssertionError.
        LayoutError: `cut` is unknown.
        UnknownDimError: The grid has no such dim.
        RankOutsideError: The calling rank is not in the grid.

    Example:
        Each rank has the mean over its tokens, and its gradients are averaged afterwards.

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
    """Check that ranks draw equal random numbers along some dims, and different numbers otherwise.

    Args:
        grid: The grid.
        draw: A function that returns a tensor of random numbers, such as
            `lambda: dropout(torch.ones(64))`. The tensor must be so long that two random states do
            not lead to equal numbers by chance.
        same: The dims along which ranks must draw equal numbers, such as "tp" for the dropout of an
            activation that is not split. Ranks that differ in any other dim must draw different
            numbers.

    Raises:
        PropertyError: Two ranks draw different numbers although they must draw equal numbers, or
            the reverse. The error names both ranks.
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
            cause = f"must draw {'different' if differ else 'equal'} numbers"
            raise PropertyError(
                f"ranks {rank} ({format_coords(one)}) and {other} ({format_coords(two)}) {cause}: "
                f"same={equal}; a seed that differs along the other dims is grid.seed(1, {others})",
                {(rank, "draw"): cause, (other, "draw"): cause},
            )


# ---- the comparison -----------------------------------------------------------------------------


@attrs.frozen
class _Comparison:
    """Compares the tensors of each rank with the rank's parts of the dense tensors.

    Attributes:
        grid: The grid.
        dim: The dims along which tensors are split.
        cuts: The axis along which each tensor is split, by name.
        zigzag: Whether each position has two chunks, as in `layer`.
        tolerance: `rtol` and `atol`.
    """

    grid: GridView
    dim: Dims
    cuts: Mapping[str, int | None]
    zigzag: bool
    tolerance: Mapping[str, Any]

    def part(self, name: str, whole: Tensor, at: int) -> Tensor:
        """Return the part of a full tensor for a position along the dims."""
        axis = self.cuts.get(name.removeprefix("gradient of "))
        size = self.grid[self.dim].size
        if axis is None or whole.ndim == 0:
            return whole
        if not self.zigzag:
            return whole.tensor_split(size, axis)[at]
        chunks = whole.tensor_split(2 * size, axis)
        return torch.cat([chunks[at], chunks[-1 - at]], axis)

    def difference(self, mine: Tensor, part: Tensor) -> str:
        """Return a description of the difference between two tensors, or "" if they are close."""
        try:
            torch.testing.assert_close(mine, part, check_dtype=False, **self.tolerance)
        except AssertionError as error:
            return str(error).rpartition("\n\n")[2]
        return ""

    def compare(self, wholes: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Raise on all ranks if any rank's tensor differs from the part that it should have.

        Args:
            wholes: The full tensors, by name.
            own: This rank's tensors, by name.
        """
        # clone() waits until a functional collective has ended.
        waited = {name: each.detach().clone().cpu() for name, each in own.items()}
        found = _gather(self.grid, waited)
        texts = []
        causes = {}
        for (name, whole), rank in itertools.product(wholes.items(), found):
            members = self.grid.group_ranks(self.dim, rank)
            at = members.index(rank)
            group = [found[member][name] for member in members]
            parts = [self.part(name, whole.detach().cpu(), each) for each in range(len(members))]
            difference = self.difference(group[at], parts[at])
            if difference:
                cause = causes[rank, name] = self.cause(group, parts, at)
                where = f"{name} of rank {rank} ({format_coords(self.grid.coords(rank))})"
                where += " differs from the dense tensor"
                if cause:
                    where += f": {cause}"
                texts.append(f"{where}\n{difference}")
        if causes:
            raise PropertyError("\n\n".join(texts), causes)

    def cause(self, group: list[Tensor], parts: list[Tensor], at: int) -> str:
        """Return a mistake that leads to exactly the tensor of a rank, or "" if no mistake does.

        Args:
            group: The tensor of each member of the rank's group.
            parts: The dense part of each member.
            at: The position of the rank in the group.
        """
        mine = group[at]
        part = parts[at]
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
    """Call a function with tensors.

    If the function is a module, tensors with the names of parameters are copied into the
    parameters.

    Returns:
        The leaves of autograd by name, and the output.
    """
    own = _parameters(function)
    leaves = {}
    for name, value in tensors.items():
        leaf = leaves[name] = own.get(name, value.clone())
        if leaf.is_floating_point():
            leaf.requires_grad_().grad = torch.zeros_like(leaf)
        local = _local(leaf.detach())
        if local.shape != value.shape:
            raise LayoutError(
                f"the parameter {name!r} has shape {tuple(local.shape)}, but this rank's "
                f"part of the dense parameter has shape {tuple(value.shape)}; pass the "
                f"shapes of the dense layer"
            )
        local.copy_(value)
    result = function(*(leaf for name, leaf in leaves.items() if name not in own))
    return leaves, _local(result[0] if isinstance(result, tuple) else result)


def _gradients(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of leaves, by names such as "gradient of weight"."""
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {f"gradient of {name}": _local(grad) for name, grad in grads.items()}


def _gather(grid: GridView, value: Any) -> dict[int, Any]:
    """Return the value of each rank of the grid, by rank."""
    everyone = grid[grid.dim_names]
    gathered: list[Any] = [None] * everyone.size
    dist.all_gather_object(gathered, (everyone.ranks[everyone.rank], value), group=everyone.group)
    return dict(sorted(gathered))
