"""A program with the structure of Megatron-LM's pretrain_gpt.py, which does not use hypercomm.

The program imports Megatron at the top of the file, and the model from a file in the same folder.
It parses its arguments, and trains on mock data. The last rank prints the loss of each step.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import mpu, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_state import get_data_parallel_group
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from model_provider import model_provider
from on_the_cpu import OnTheCpu

LENGTH, MICRO_BATCHES, MICRO_BATCH = 16, 2, 2


def read_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--train-iters", type=int, default=1)
    return parser.parse_args()


def mock_data(steps):
    generator = torch.Generator().manual_seed(mpu.get_data_parallel_rank())
    for _ in range(steps * MICRO_BATCHES):
        yield torch.randint(64, (MICRO_BATCH, LENGTH + 1), generator=generator)


def forward_step(data_iterator, model):
    tokens = next(data_iterator)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    places = torch.arange(LENGTH).expand(MICRO_BATCH, -1)
    losses = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:])
    return losses, lambda output: (output.mean(), {"loss": output.detach().mean()})


def pretrain(arguments, provide):
    dist.init_process_group("gloo")
    sizes = {
        "tensor_model_parallel_size": arguments.tensor_model_parallel_size,
        "pipeline_model_parallel_size": arguments.pipeline_model_parallel_size,
    }
    mpu.initialize_model_parallel(**sizes)
    torch.manual_seed(mpu.get_pipeline_model_parallel_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        batch_p2p_sync=False,
        finalize_model_grads_func=finalize_model_grads,
        **sizes,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), provide(config))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0), [model]
    )
    run_pipeline = get_forward_backward_func()
    data = mock_data(arguments.train_iters)
    for step in range(arguments.train_iters):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        outputs = run_pipeline(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        optimizer.step()
        if outputs:
            loss = torch.stack([output["loss"] for output in outputs]).mean()
            dist.all_reduce(loss, group=get_data_parallel_group())
            if dist.get_rank() == dist.get_world_size() - 1:
                print(f"step {step} loss {loss.item().hex()}", flush=True)
    if dist.get_rank() == 0:
        print(f"{mpu.__name__} {Path(__file__).name} {__name__}", flush=True)
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = read_arguments()
    with OnTheCpu():
        pretrain(arguments, partial(model_provider, length=LENGTH))
