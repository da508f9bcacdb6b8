"""A small GPT of megatron-core, trained with Megatron's parallel state and with hypercomm's.

    pip install megatron-core matplotlib
    python examples/megatron_gpt.py --out losses.png

Trains a dense model (tp=2, pp=2, dp=2) and one with experts (pp=2, dp=4, ep=2) on 8 local ranks.
Model, pipeline schedule, gradient reduction and optimizer are megatron-core's. Both models are
trained with Megatron's parallel state, then in new processes after `install()`, and the results are
compared.
"""

import argparse
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Megatron compiles some functions on every rank; this run is too short for that.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hypercomm import run_ranks
from hypercomm.testing import registered_groups

TEXT = "how much wood would a woodchuck chuck if a woodchuck could chuck wood? "
ALPHABET = sorted(set(TEXT))
RANKS, STEPS, MICRO_BATCHES, MICRO_BATCH, LENGTH, RATE = 8, 40, 2, 4, 32, 5e-3

# For each model: the sizes of the parallel state and of the model, and its other settings.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense: tp=2, pp=2, dp=2": (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {},
    ),
    "experts: pp=2, dp=4, ep=2": (
        {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
        {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 1e-2},
    ),
}


class Run(NamedTuple):
    """The results of one training on one rank."""

    losses: list[float]
    weights: Tensor


class Report(NamedTuple):
    """The results of one rank: the name of the parallel state that Megatron used, and all runs."""

    module: str
    runs: list[Run]
    groups_left: int


class OnTheCpu(TorchFunctionMode):
    """Replaces "cuda" by the CPU where a tensor is created or moved."""

    def __torch_function__(
        self,
        function: Any,
        _: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def let_megatron_run_on_a_cpu() -> OnTheCpu:
    """Replace the functions of CUDA that megatron-core calls in every configuration."""
    # Megatron makes tensors on this device. Since 0.19, it reads the stream to sum gradients.
    torch.cuda.current_device = torch.cpu.current_device  # type: ignore[assignment]
    torch.cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    # The router of Megatron reads a name that exists only with Transformer Engine.
    from megatron.core.transformer.moe import moe_utils

    moe_utils.__dict__.setdefault("te_general_gemm", None)
    # The pipeline schedule, the optimizer and the shared embeddings use device="cuda" or .cuda().
    return OnTheCpu()


def batches(dp: int, of: int) -> Iterator[Tensor]:
    """Yield the micro-batches of one dp rank: pieces of the text, again and again."""
    text = torch.tensor([ALPHABET.index(letter) for letter in TEXT])
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(len(TEXT), (of, MICRO_BATCHES, MICRO_BATCH, 1), generator=generator)
        yield from text[(starts[dp] + torch.arange(LENGTH + 1)) % len(TEXT)]


def forward(pieces: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    """Predict each letter from the letters before it. Megatron's schedule calls this function."""
    letters = next(pieces)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    places = torch.arange(LENGTH).expand(MICRO_BATCH, -1)
    losses = model(letters[:, :-1], places, hidden, labels=letters[:, 1:])

    def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return losses.mean(), {"loss": losses.detach().mean()}

    return losses, mean


def train(sizes: dict[str, Any], extra: dict[str, Any]) -> Run:
    """Train one model. Only the last pipeline stage returns losses, which are averaged over dp."""
    from megatron.core import parallel_state as mpu, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    mpu.initialize_model_parallel(**sizes)
    torch.manual_seed(mpu.get_pipeline_model_parallel_rank())
    # The tracker for inference tracks nothing, and nothing is random here: there is no dropout.
    tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        batch_p2p_sync=False,  # there is no CUDA to wait for
        **sizes,
        **extra,
    )
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(),
        GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
            vocab_size=len(ALPHABET),
            max_sequence_length=LENGTH,
            pre_process=mpu.is_pipeline_first_stage(),
            post_process=mpu.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=True,
        ),
    )
    model.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=RATE, weight_decay=0.0, clip_grad=0.0), [model]
    )
    config.finalize_model_grads_func = finalize_model_grads
    run_pipeline = get_forward_backward_func()
    dp = mpu.get_data_parallel_world_size()
    pieces = batches(mpu.get_data_parallel_rank(), dp)
    losses: list[float] = []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        outputs = run_pipeline(
            forward_step_func=forward,
            data_iterator=pieces,
            model=model,
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        optimizer.step()
        if outputs:
            loss = torch.stack([output["loss"] for output in outputs]).mean()
            dist.all_reduce(loss, group=mpu.get_data_parallel_group())
            losses.append(loss.item() / dp)
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    mpu.destroy_model_parallel()
    return Run(losses, weights)


def train_all(install: bool) -> Report:
    """Train all models, after `install()` or without it. The process has not loaded Megatron."""
    if install:
        from hypercomm.compat import megatron

        megatron.install()
    warnings.simplefilter("ignore")  # Megatron lists packages that would make it faster
    from megatron.core.pipeline_parallel import schedules

    before = registered_groups()
    with let_megatron_run_on_a_cpu():
        runs = [train(sizes, extra) for sizes, extra in MODELS.values()]
    return Report(schedules.parallel_state.__name__, runs, len(registered_groups() - before))


def compare(before: list[Run], after: list[Run]) -> str:
    """Print some losses of both runs and their largest difference. Count the equal losses."""
    print(f"{'model':26} {'step':>4}   {'loss':6}   {'before install()':20}   after install()")
    pairs: list[tuple[float, float]] = []
    for name, one, other in zip(MODELS, before, after, strict=True):
        rows = list(zip(one.losses, other.losses, strict=True))
        for step in (*range(0, STEPS, STEPS // 4), STEPS - 1):
            a, b = rows[step]
            print(f"{name:26} {step:4}   {a:.4f}   {a.hex():20}   {b.hex()}")
        pairs += rows
    same = sum(a.hex() == b.hex() for a, b in pairs)
    verdict = f"bit-identical losses: {same} of {len(pairs)}"
    print(verdict)
    print(f"largest difference: {max(abs(a - b) for a, b in pairs):.1e}")
    return verdict


def draw(before: list[Run], after: list[Run], verdict: str, file: Path) -> None:
    """Draw the losses of each model: a line without install(), dots with it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        1, len(MODELS), figsize=(10, 4.5), sharey=True, layout="constrained"
    )
    for axes, name, one, other in zip(panels, MODELS, before, after, strict=True):
        guessing = math.log(len(ALPHABET))
        axes.axhline(guessing, color="#6c757d", linestyle=":", label="guessing any letter")
        axes.plot(one.losses, color="#e09f3e", linewidth=4, label="before install()")
        axes.plot(other.losses, "o", color="#0b6e4f", markersize=4, label="after install()")
        axes.set(title=name, xlabel="step", ylim=(0, None))
        axes.grid(visible=True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss of a letter (nats)")
    panels[0].legend(frameon=False, loc="lower left")
    figure.suptitle(
        f"megatron-core's GPT on {RANKS} ranks: Megatron's own parallel state, and hypercomm's\n"
        f"{verdict}"
    )
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a GPT before and after install().")
    parser.add_argument(
        "--out", type=Path, help="write the loss curves as a picture, such as a.png"
    )
    out = parser.parse_args().out
    before, after = (run_ranks(train_all, RANKS, args=(install,)) for install in (False, True))
    print(f"before install() Megatron runs on {before[0].module}")
    print(f"after install() Megatron runs on {after[0].module}\n")
    last = before[-1].runs, after[-1].runs  # the last rank is on the last pipeline stage
    verdict = compare(*last)
    same = [
        all(torch.equal(a.weights, b.weights) for a, b in zip(one.runs, other.runs, strict=True))
        for one, other in zip(before, after, strict=True)
    ]
    print(f"bit-identical weights: on {sum(same)} of {RANKS} ranks")
    print(f"process groups left: {max(report.groups_left for report in after)}")
    if out:
        draw(*last, verdict, out)
        print(f"the loss curves are in {out}")
