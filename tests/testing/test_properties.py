"""Test that properties of parallel layers accept correct layers and find planted mistakes."""

import functools
import re
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

# ---- sharded layers, each with an argument `bug` for the mistake to make -------------------------


class Sum(torch.autograd.Function):
    """Sum a tensor over a dim. Its gradient is passed to each part."""

    @staticmethod
    def forward(ctx, part, dim):
        ctx.dim = dim
        return dim.sum(part)

    @staticmethod
    def backward(_, gradient):
        return gradient, None


class SumTwice(Sum):
    """A sum that wrongly sums the gradient, too, although all ranks have the same loss."""

    @staticmethod
    def backward(ctx, gradient):
        return ctx.dim.sum(gradient), None


class Copy(torch.autograd.Function):
    """Copy a tensor on each rank of a dim, and sum the gradients of the copies."""

    @staticmethod
    def forward(ctx, whole, dim):
        ctx.dim = dim
        return whole.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.dim.sum(gradient), None


class Gather(torch.autograd.Function):
    """Gather the parts of all ranks along an axis. Sum the gradients if `is_sum`."""

    @staticmethod
    def forward(ctx, part, dim, axis, is_sum):
        ctx.dim, ctx.axis, ctx.is_sum = dim, axis, is_sum
        parts = [torch.empty_like(part) for _ in range(dim.size)]
        dist.all_gather(parts, part.contiguous(), group=dim.group)
        return torch.cat(parts, axis)

    @staticmethod
    def backward(ctx, gradient):
        whole = ctx.dim.sum(gradient) if ctx.is_sum else gradient
        return whole.chunk(ctx.dim.size, ctx.axis)[ctx.dim.rank], None, None, None


class Part(torch.autograd.Function):
    """Sum over a dim and return this rank's part along an axis. The gradient is gathered."""

    @staticmethod
    def forward(ctx, whole, dim, axis):
        ctx.dim, ctx.axis = dim, axis
        return dim.sum(whole).chunk(dim.size, axis)[dim.rank].clone()

    @staticmethod
    def backward(ctx, gradient):
        return Gather.apply(gradient, ctx.dim, ctx.axis, True), None, None


def column(tp, bug=None):
    def layer(x, weight, bias):
        own = x if bug == "gradient of the input not summed" else Copy.apply(x, tp)
        y = functional.linear(own, weight, bias)
        if bug == "parts in another order":
            last = Gather.apply(y, tp, -1, True).chunk(tp.size, -1)
            return last[(tp.rank + 1) % tp.size]
        return y

    return layer


def row(tp, bug=None):
    def layer(x, weight, bias):
        add = SumTwice if bug == "gradient summed twice" else Sum
        if bug == "output not summed":
            return functional.linear(x, weight) + bias / tp.size
        return add.apply(functional.linear(x, weight), tp) + bias

    return layer


def sequence_column(tp, bug=None):
    is_sum = bug != "gradient of the input not summed"
    return lambda x, weight, bias: functional.linear(Gather.apply(x, tp, 0, is_sum), weight, bias)


def sequence_row(tp, bug=None):
    def layer(x, weight, bias):
        own = bias if bug == "gradient of the bias not summed" else Copy.apply(bias, tp)
        return Part.apply(functional.linear(x, weight), tp, 0) + own

    return layer


def attention(cp, *, causal, zigzag, bug=None):
    """Return attention to the gathered keys and values of all ranks."""

    def positions(rank, tokens):
        if not zigzag:
            return torch.arange(tokens) + rank * tokens
        half = tokens // 2
        starts = rank * half, (2 * cp.size - 1 - rank) * half
        return torch.cat([torch.arange(half) + start for start in starts])

    def layer(query, key, value):
        is_sum = bug != "gradient of keys not summed"
        keys, values = (Gather.apply(each, cp, 2, is_sum) for each in (key, value))
        tokens = query.size(2)
        own = positions(0 if bug == "local positions" else cp.rank, tokens)
        every = torch.cat([positions(rank, tokens) for rank in range(cp.size)])
        mask = own[:, None] >= every if causal else None
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    return layer


def vocabulary_loss(tp, bug=None, reduction="mean"):
    def loss(logits, targets):
        add = SumTwice if bug == "gradient summed twice" else Sum
        size = logits.size(1)
        largest = Gather.apply(logits.detach(), tp, 1, True).amax(1, keepdim=True)
        exponents = (logits - largest).exp().sum(1)
        if bug != "exponents not summed":
            exponents = add.apply(exponents, tp)
        index = targets - tp.rank * size
        is_own = (index >= 0) & (index < size)
        picked = (logits - largest).gather(1, index.clamp(0, size - 1)[:, None])[:, 0]
        losses = exponents.log() - add.apply(picked * is_own, tp)
        return losses.mean() if reduction == "mean" else losses

    return loss


def token_loss(dp, bug=None):
    def loss(logits, targets):
        if bug == MEAN:
            return functional.cross_entropy(logits, targets)
        if bug == MEANS:
            return functional.cross_entropy(logits, targets) / dp.size
        share = functional.cross_entropy(logits, targets, reduction="sum")
        count = dp.sum((targets >= 0).sum())
        return share / count / (dp.size if bug == AVERAGED else 1)

    return loss


# ---- correct layers ------------------------------------------------------------------------------


# Correct layers pass. The grid also has another dim, and both orders of the dims are tested.
@pytest.mark.ranks(4)
def test_correct_layers_pass():
    for sizes in ("tp=2,dp=2", "dp=2,tp=2"):
        with HyperCommGrid(sizes) as grid:
            tp = grid["tp"]
            properties.linear(grid, "tp", column(tp), "column")
            properties.linear(grid, "tp", row(tp), "row", features=(6, 3))
            properties.linear(
                grid, "tp", column(tp), "column", features=(3, 2), dtype=torch.float64
            )
            properties.linear(grid, "tp", sequence_column(tp), "column", sequence=0)
            properties.linear(grid, "tp", sequence_row(tp), "row", sequence=0)
            plain = functools.partial(row(tp), bias=torch.zeros(1))
            properties.linear(grid, "tp", plain, "row", bias=False)
            properties.loss(grid, "tp", vocabulary_loss(tp), "vocabulary")
            properties.loss(grid, "dp", token_loss(grid["dp"]), "tokens", padded=True)


@pytest.mark.full
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.ranks(4)
def test_correct_attention_passes(causal, zigzag):
    for sizes in ("cp=4", "dp=2,cp=2"):
        with HyperCommGrid(sizes) as grid:
            own = attention(grid["cp"], causal=causal, zigzag=zigzag)
            properties.attention(grid, "cp", own, causal=causal, zigzag=zigzag)


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


def of_linear(cut, make, **options):
    return lambda grid, bug: properties.linear(grid, "tp", make(grid["tp"], bug), cut, **options)


def of_attention(*, causal):
    return lambda grid, bug: properties.attention(
        grid, "tp", attention(grid["tp"], causal=causal, zigzag=False, bug=bug), causal=causal
    )


def of_loss(cut, make, **options):
    return lambda grid, bug: properties.loss(grid, "tp", make(grid["tp"], bug), cut, **options)


OF_THE_INPUT, OF_THE_BIAS = "gradient of the input not summed", "gradient of the bias not summed"
TWICE = "gradient summed twice"
MEAN, MEANS = "no division by the number of ranks", "mean of means"
AVERAGED = "divided by the number of tokens, and gradients averaged"

COLUMN, ROW = of_linear("column", column), of_linear("row", row)
COLUMN_BY_TOKENS = of_linear("column", sequence_column, sequence=0)
ROW_BY_TOKENS = of_linear("row", sequence_row, sequence=0)
ATTENTION, CAUSAL = of_attention(causal=False), of_attention(causal=True)
VOCABULARY, TOKENS = of_loss("vocabulary", vocabulary_loss), of_loss("tokens", token_loss)

MISTAKES = [
    # the property, the mistake, the tensors that differ, and a part of the reported cause
    (COLUMN, OF_THE_INPUT, ["gradient of input"], "all-reduce"),
    (COLUMN, "parts in another order", ["output"], "position"),
    (ROW, "output not summed", ["output"], "all-reduce"),
    (ROW, TWICE, ["gradient of input", "gradient of weight"], "by 4"),
    (COLUMN_BY_TOKENS, OF_THE_INPUT, ["gradient of input"], ""),
    (ROW_BY_TOKENS, OF_THE_BIAS, ["gradient of bias"], "all-reduce"),
    (CAUSAL, "local positions", ["output"], ""),
    (ATTENTION, "gradient of keys not summed", ["gradient of key", "gradient of value"], ""),
    (VOCABULARY, TWICE, ["gradient of logits"], "by 4"),
    (VOCABULARY, "exponents not summed", ["output"], ""),
    (TOKENS, MEAN, ["gradient of logits"], "by 4"),
    (of_loss("tokens", token_loss, padded=True), MEANS, ["gradient of logits"], ""),
    (TOKENS, AVERAGED, ["gradient of logits"], "by 1/4"),
]


# Each mistake is found. All ranks raise with the same causes, which name the tensors that differ.
@pytest.mark.full
@pytest.mark.parametrize(
    ("check", "bug", "tensors", "word"),
    MISTAKES,
    ids=[f"{number}-{mistake[1].replace(' ', '_')}" for number, mistake in enumerate(MISTAKES)],
)
@pytest.mark.ranks(4)
def test_planted_mistakes_are_found(check, bug, tensors, word):
    with HyperCommGrid("tp=4") as grid:
        with pytest.raises(PropertyError) as caught:
            check(grid, bug)
        causes = caught.value.causes
        gathered = [None] * grid.size
        dist.all_gather_object(gathered, causes)
        assert all(each == causes for each in gathered)
        assert {tensor for _, tensor in causes} == {*tensors}
        assert all(word in cause and bool(word) == bool(cause) for cause in causes.values())


# If only some ranks make a mistake, the error names their coordinates and the index of the largest
# difference.
@pytest.mark.full
@pytest.mark.ranks(4)
def test_mistake_on_some_ranks_is_located():
    with HyperCommGrid("tp=2,dp=2") as grid:

        def wrong(logits, targets):
            loss = functional.cross_entropy(logits, targets, reduction="none")
            if grid.coords()["dp"] == 1:
                return loss + 1.5 * (torch.arange(4) == 2)
            return loss

        def check():
            dense = functional.cross_entropy
            properties.layer(
                grid,
                "tp",
                wrong,
                lambda *both: dense(*both, reduction="none"),
                {"logits": (8, 5), "targets": torch.arange(8) % 5},
                cuts={"logits": 0, "targets": 0, "output": 0},
            )

        with pytest.raises(PropertyError) as caught:
            check()
        assert caught.value.causes == {(2, "output"): "", (3, "output"): ""}
        text = str(caught.value)
        for rank, coords in ((2, "tp=0, dp=1"), (3, "tp=1, dp=1")):
            largest = rf"rank {rank} \({coords}\).*\n.*\n.*1\.(5|4999)\d* at index \(2,\)"
            assert re.search(largest, text)


# Random numbers must agree along `same` and differ along all other dims, even if seeds are sums of
# coordinates.
@pytest.mark.full
@pytest.mark.parametrize(
    ("seed_of", "same", "wrong"),
    [
        (lambda grid: grid.seed(7, "dp"), "tp", None),
        (lambda grid: grid.seed(7, "tp", "dp"), (), None),
        (lambda _: 7, ["tp", "dp"], None),
        (lambda _: 7, "tp", {0, 2}),
        (lambda grid: grid.seed(7, "dp"), (), {0, 1}),
        (lambda _: dist.get_rank(), "tp", {0, 1}),
        (lambda grid: sum(grid.coords().values()), (), {1, 2}),
    ],
)
@pytest.mark.ranks(4)
def test_random_state_is_checked(seed_of, same, wrong):
    with HyperCommGrid("tp=2,dp=2") as grid:
        torch.manual_seed(seed_of(grid))

        def draw():
            return functional.dropout(torch.ones(64))

        if wrong is None:
            properties.random_state(grid, draw, same)
            return
        with pytest.raises(PropertyError) as caught:
            properties.random_state(grid, draw, same)
        assert {rank for rank, _ in caught.value.causes} == wrong


# A missing gradient, a part with the wrong shape, and invalid arguments raise.
@pytest.mark.full
@pytest.mark.ranks(2)
def test_missing_gradients_and_wrong_shapes():
    with HyperCommGrid("tp=2") as grid:
        tp = grid["tp"]

        def detached(x, weight, bias):
            return row(tp)(x, weight.detach(), bias)

        with pytest.raises(PropertyError) as caught:
            properties.linear(grid, "tp", detached, "row", features=(4, 4))
        assert {*caught.value.causes} == {(0, "gradient of weight"), (1, "gradient of weight")}
        assert all("zero" in cause for cause in caught.value.causes.values())
        with pytest.raises(PropertyError) as caught:
            properties.linear(
                grid,
                "tp",
                lambda *given: column(tp)(*given)[..., 1:],
                "column",
                features=(4, 4),
            )
        assert {*caught.value.causes} == {(0, "output"), (1, "output")}
        with pytest.raises(LayoutError):
            properties.linear(grid, "tp", torch.nn.Linear(3, 3), "column")
        for wrong in (properties.linear, properties.loss):
            with pytest.raises(LayoutError):
                wrong(grid, "tp", column(tp), "columns")
        with pytest.raises(UnknownDimError):
            properties.linear(grid, "cp", column(tp), "column")
