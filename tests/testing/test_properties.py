"""Test that properties of parallel layers accept correct layers and find planted mistakes."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from hypercomm import HyperCommGrid
from hypercomm.errors import LayoutError, UnknownDimError
from hypercomm.testing import properties
from hypercomm.testing.properties import PropertyError

# ---- a correct layer -----------------------------------------------------------------------------


def own_part(whole, dim, axis, *, zigzag):
    """Return a rank's part of a tensor, which is not split if the axis is None."""
    if axis is None or not whole.ndim:
        return whole
    chunks = whole.chunk(2 * dim.size if zigzag else dim.size, axis)
    return (
        torch.cat([chunks[dim.rank], chunks[-1 - dim.rank]], axis) if zigzag else chunks[dim.rank]
    )


def parts_of(part, dim):
    parts = [torch.empty_like(part) for _ in range(dim.size)]
    dist.all_gather(parts, part.contiguous(), group=dim.group)
    return parts


class Whole(torch.autograd.Function):
    """Gather a tensor. Its gradient is the rank's part of the gradients' sum, or of its own one."""

    @staticmethod
    def forward(ctx, part, dim, axis, zigzag, is_sum):
        ctx.given = dim, axis, zigzag, is_sum
        if axis is None:
            return part.clone()
        parts = parts_of(part, dim)
        if zigzag:
            halves = [part.chunk(2, axis) for part in parts]
            parts = [first for first, _ in halves] + [last for _, last in halves[::-1]]
        return torch.cat(parts, axis)

    @staticmethod
    def backward(ctx, gradient):
        dim, axis, zigzag, is_sum = ctx.given
        whole = dim.sum(gradient) if is_sum else gradient
        return own_part(whole, dim, axis, zigzag=zigzag), None, None, None, None


def sharded(dim, dense, cuts, zigzag=False, mistake_in=None, mistake=None):
    """Return a layer that gathers its tensors, calls a dense layer, and returns the rank's part.

    Args:
        dim: The dim along which tensors are split.
        dense: The dense layer.
        cuts: The axis of each tensor and of the output, by name.
        zigzag: Whether each rank has two chunks of a tensor.
        mistake_in: The name of the tensor, or "output", that the mistake changes.
        mistake: A function that changes the output, or the gradient of the tensor.
    """

    is_sum = cuts["output"] is not None  # otherwise, each rank computes the whole output

    def layer(*parts):
        tensors = dict(zip(cuts, parts, strict=False))
        if mistake_in in tensors:
            tensors[mistake_in].register_hook(mistake)
        wholes = [Whole.apply(tensors[name], dim, cuts[name], zigzag, is_sum) for name in tensors]
        output = own_part(dense(*wholes), dim, cuts["output"], zigzag=zigzag)
        return mistake(output) if mistake_in == "output" else output

    return layer


LINEAR = {
    # the arguments of `properties.linear`, and the axis along which each tensor is split
    "column": (("column",), {"input": None, "weight": 0, "bias": 0, "output": 2}),
    "column by tokens": (("column", 0), {"input": 0, "weight": 0, "bias": 0, "output": 2}),
    "row": (("row",), {"input": 2, "weight": 1, "bias": None, "output": None}),
    "row by tokens": (("row", 0), {"input": 2, "weight": 1, "bias": None, "output": 0}),
}
TOKENS = {"query": 2, "key": 2, "value": 2, "output": 2}
LOSS = {
    "vocabulary": {"logits": 1, "targets": None, "output": None},
    "tokens": {"logits": 0, "targets": 0, "output": None},
}


def checks(grid, dim):
    """Yield (cuts, check) for each property. A check takes the arguments of `sharded` after cuts.

    The layers that the property compares with are written down again here.
    """

    def check(of, dense, cuts, *given, zigzag=False, **options):
        def run(*mistake):
            own = sharded(grid[dim], dense, cuts, zigzag, *mistake)
            of(grid, dim, own, *given, zigzag=zigzag, **options)

        return cuts, run

    for (cut, *sequence), cuts in LINEAR.values():
        options = {"sequence": sequence[0]} if sequence else {}
        yield check(properties.linear, functional.linear, cuts, cut, **options)
    for causal in (False, True):
        dense = functools.partial(functional.scaled_dot_product_attention, is_causal=causal)
        for zigzag in (False, True):
            yield check(properties.attention, dense, TOKENS, causal=causal, zigzag=zigzag)
    for cut, cuts in LOSS.items():
        yield check(properties.loss, functional.cross_entropy, cuts, cut, padded=cut == "tokens")


# Correct layers pass. The grid also has another dim, and both orders of the dims are tested.
@pytest.mark.ranks(4)
def test_correct_layers_pass():
    for sizes in ("tp=2,dp=2", "dp=2,tp=2"):
        with HyperCommGrid(sizes) as grid:
            for _, check in checks(grid, "tp"):
                check()
            _, cuts = LINEAR["row"]
            own = sharded(grid["tp"], functional.linear, cuts)
            properties.linear(grid, "tp", own, "row", features=(6, 3), dtype=torch.float64)
            plain = {name: cuts[name] for name in ("input", "weight", "output")}
            own = sharded(grid["tp"], functional.linear, plain)
            properties.linear(grid, "tp", own, "row", bias=False)


# Modules from `parallelize_module` pass. Their parameters are DTensors.
@pytest.mark.full
@pytest.mark.ranks(4)
def test_dtensor_modules_pass():
    with HyperCommGrid("tp=2,dp=2") as grid:
        mesh = grid.device_mesh("tp")

        def linear(style):
            return parallelize_module(torch.nn.Linear(8, 12), mesh, style)

        properties.linear(grid, "tp", linear(ColwiseParallel()), "column")
        properties.linear(grid, "tp", linear(RowwiseParallel()), "row")
        by_tokens = ColwiseParallel(input_layouts=Shard(0))
        properties.linear(grid, "tp", linear(by_tokens), "column", sequence=0)
        by_tokens = RowwiseParallel(output_layouts=Shard(0))
        properties.linear(grid, "tp", linear(by_tokens), "row", sequence=0)
        norm = parallelize_module(torch.nn.LayerNorm(6), mesh, SequenceParallel(sequence_dim=0))
        rows = {"x": 0, "output": 0}
        properties.layer(grid, "tp", norm, torch.nn.LayerNorm(6), {"x": (4, 6)}, cuts=rows)

        def block():
            return torch.nn.Sequential(
                torch.nn.Linear(5, 8), torch.nn.GELU(), torch.nn.Linear(8, 5)
            )

        own = parallelize_module(block(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        cuts = {"0.weight": 0, "0.bias": 0, "2.weight": 1}
        properties.layer(grid, "tp", own, block(), {"x": (3, 5)}, cuts=cuts)


# Megatron's layers, which return pairs, pass. (Its sequence parallel layers need a GPU.)
@pytest.mark.clients
@pytest.mark.ranks(2)
def test_megatron_layers_pass():
    warnings.simplefilter("ignore")
    from megatron.core import ModelParallelConfig, parallel_state as state
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = ModelParallelConfig(
        tensor_model_parallel_size=2, use_cpu_initialization=True, params_dtype=torch.float32
    )
    options = {"config": config, "init_method": torch.nn.init.zeros_, "bias": True}
    first = ColumnParallelLinear(8, 12, gather_output=False, **options)
    last = RowParallelLinear(8, 12, input_is_parallel=True, skip_bias_add=False, **options)
    with HyperCommGrid("tp=2") as grid:
        properties.linear(grid, "tp", first, "column")
        properties.linear(grid, "tp", last, "row")
    state.destroy_model_parallel()


# ---- planted mistakes ----------------------------------------------------------------------------

MISTAKES = {
    # a part of the reported cause: the change of the tensor, and the ranks that make it
    "by 2": (lambda own, _: own * 2, {0, 1, 2, 3}),
    "by 1/2": (lambda own, _: own / 2, {3}),
    "zero": (lambda own, _: own * 0, {1}),
    "": (lambda own, _: own + 1, {2, 3}),
    # for tensors that are split
    "position": (lambda own, dim: parts_of(own, dim)[dim.rank - 1], {0, 1, 2, 3}),
    # for tensors that are not: the sum of both is right
    "all-reduce": (lambda own, dim: own * (dim.rank + 1) / 3, {0, 1, 2, 3}),
}


# Each mistake in the output or a gradient is found, with its cause. All ranks raise with the same
# causes, which name the ranks and tensors that differ.
@pytest.mark.full
@pytest.mark.parametrize("cause", MISTAKES)
@pytest.mark.ranks(4)
def test_planted_mistakes_are_found(cause):
    change, ranks = MISTAKES[cause]
    found = 0
    with HyperCommGrid("tp=2,dp=2") as grid:
        tp = grid["tp"]
        for cuts, check in checks(grid, "tp"):
            names = cuts.keys() - {"targets", "output" if cuts == LOSS["tokens"] else ""}
            unfit = {"position": {None}, "all-reduce": {0, 1, 2}}.get(cause, set())
            for name in sorted(name for name in names if cuts[name] not in unfit):
                with pytest.raises(PropertyError) as caught:
                    check(name, lambda own: change(own, tp) if dist.get_rank() in ranks else own)
                tensor = name if name == "output" else f"gradient of {name}"
                causes = caught.value.causes
                assert causes.keys() == {(rank, tensor) for rank in ranks}
                assert all(cause in text and bool(cause) == bool(text) for text in causes.values())
                coords = ", ".join(f"{dim}={at}" for dim, at in grid.coords(max(ranks)).items())
                assert f"{tensor} of rank {max(ranks)} ({coords}) differs" in str(caught.value)
                gathered = [None] * grid.size
                dist.all_gather_object(gathered, causes)
                assert all(each == causes for each in gathered)
                found += 1
    assert found > 4


# Random numbers must agree along `same` and differ along all other dims, even if seeds are sums of
# coordinates.
@pytest.mark.full
@pytest.mark.ranks(4)
def test_random_state_is_checked():
    def draw():
        return functional.dropout(torch.ones(64))

    with HyperCommGrid("tp=2,dp=2") as grid:
        for seed, same in (
            (grid.seed(7, "dp"), "tp"),
            (grid.seed(7, "tp", "dp"), ()),
            (7, ["tp", "dp"]),
        ):
            torch.manual_seed(seed)
            properties.random_state(grid, draw, same)
        for seed, same, wrong in (
            (7, "tp", {0, 2}),
            (grid.seed(7, "dp"), (), {0, 1}),
            (dist.get_rank(), "tp", {0, 1}),
            (sum(grid.coords().values()), (), {1, 2}),
        ):
            torch.manual_seed(seed)
            with pytest.raises(PropertyError) as caught:
                properties.random_state(grid, draw, same)
            assert {rank for rank, _ in caught.value.causes} == wrong


# A missing gradient, a part with the wrong shape, and invalid arguments raise.
@pytest.mark.full
@pytest.mark.ranks(2)
def test_missing_gradients_and_wrong_shapes():
    with HyperCommGrid("tp=2") as grid:
        row = sharded(grid["tp"], functional.linear, LINEAR["row"][1])
        column = sharded(grid["tp"], functional.linear, LINEAR["column"][1])
        for own, cut, tensor, word in (
            (
                lambda x, weight, bias: row(x, weight.detach(), bias),
                "row",
                "gradient of weight",
                "zero",
            ),
            (lambda *given: column(*given)[..., 1:], "column", "output", ""),
        ):
            with pytest.raises(PropertyError) as caught:
                properties.linear(grid, "tp", own, cut, features=(4, 4))
            assert caught.value.causes.keys() == {(0, tensor), (1, tensor)}
            assert all(word in cause for cause in caught.value.causes.values())
        with pytest.raises(LayoutError):
            properties.linear(grid, "tp", torch.nn.Linear(3, 3), "column")
        for wrong in (properties.linear, properties.loss):
            with pytest.raises(LayoutError):
                wrong(grid, "tp", column, "columns")
        with pytest.raises(UnknownDimError):
            properties.linear(grid, "cp", column, "column")
