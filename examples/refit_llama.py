"""A trainer with FSDP2 and tensor parallelism sends the weights of a Llama to a running engine.

    python examples/refit_llama.py

Starts a trainer of 4 ranks (fsdp=2, tp=2) by torchrun, and an engine of 2 ranks (tp=2) as a job of
plain processes. After each of three optimizer steps, the trainer's DTensors are sent to the engine.
The engine fuses q, k and v into one tensor, and gate and up into another. Its logits are compared
with the logits of the same model, trained without any sharding.
"""

import socket
import subprocess
import sys
import warnings

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hypercomm import Fused, GridSet, World, join, join_world, transfer_state

PARTS = {"trainer": 4, "engine": 2}
LAYOUTS = {"trainer": "tp=2,fsdp=2", "engine": "tp=2"}
STEPS, BATCH, LENGTH = 3, 4, 8
HEADS, KV_HEADS = 4, 2
CONFIG = LlamaConfig(
    vocab_size=101,  # two ranks cannot split it evenly
    hidden_size=32,
    intermediate_size=44,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
)
FUSED: dict[str, Fused | list[str]] = {
    "*.qkv_proj.weight": Fused(
        ["*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"], (HEADS, KV_HEADS, KV_HEADS)
    ),
    "*.gate_up_proj.weight": ["*.gate_proj.weight", "*.up_proj.weight"],
}
CUTS = {
    **{name: {"tp": 0} for name in ("*.qkv_proj.*", "*.gate_up_proj.*", "lm_head.*")},
    **{name: {"tp": 1} for name in ("*.o_proj.*", "*.down_proj.*")},
    "*": {},
}


def data(step: int) -> Tensor:
    """Return the words of a step, equal on all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(CONFIG.vocab_size, (BATCH, LENGTH), generator=generator)


# ---- the trainer --------------------------------------------------------------------------------


def model() -> LlamaForCausalLM:
    """Make the model with random weights, equal on all ranks."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def sharded() -> LlamaForCausalLM:
    """Return the model after tensor parallelism and FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    llama = model()
    columns = dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel()
    )
    styles = {**columns, "o_proj": RowwiseParallel(), "down_proj": RowwiseParallel()}
    for layer in llama.model.layers:
        for block, children in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down"))):
            names = [f"{child}_proj" for child in children]
            parallelize_module(
                layer, mesh["tp"], {f"{block}.{name}": styles[name] for name in names}
            )
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(llama, mesh=mesh["fsdp"])
    return llama


def train(address: str) -> None:
    """Run some training steps and send the weights after each.

    Run the same steps without sharding, for comparison.
    """
    with (
        join() as job,  # the job that torchrun started
        join_world(address, name="refit", parts=PARTS, part="trainer", rank=job.rank) as world,
        GridSet(LAYOUTS, world=world) as grids,
    ):
        mapping = grids.mapping("trainer", "engine", along=None)
        llama, reference = sharded(), model()
        sides = [(llama, grids["trainer"]["fsdp"].rank), (reference, None)]
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one, _ in sides]
        for step in range(STEPS):
            for (one, part), optimizer in zip(sides, optimizers, strict=True):
                words = data(step) if part is None else data(step).chunk(2)[part]
                one(words, labels=words).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            transfer_state(mapping, llama.state_dict(), world=world)
            with torch.no_grad():
                expected = reference(data(step)).logits
            dist.broadcast(expected, 0, group=world.pg)


# ---- the engine ---------------------------------------------------------------------------------


class Engine:
    """A Llama as in inference engines: its projections are fused, and split over tp."""

    def __init__(self, world: World, grids: GridSet) -> None:
        self.tp, self.rotary = grids["engine"]["tp"], LlamaRotaryEmbedding(CONFIG)
        self.mapping = grids.mapping("trainer", "engine", along=None)
        self.world, self.size = world, CONFIG.hidden_size // HEADS
        hidden, inner = CONFIG.hidden_size, CONFIG.intermediate_size
        rows = len(torch.empty(CONFIG.vocab_size).chunk(self.tp.size)[self.tp.rank])
        heads, kv_heads = HEADS // self.tp.size, max(1, KV_HEADS // self.tp.size)
        self.split = [heads * self.size, kv_heads * self.size, kv_heads * self.size]
        shapes = {
            "model.embed_tokens": (CONFIG.vocab_size, hidden),
            "model.norm": (hidden,),
            "lm_head": (rows, hidden),
        }
        for layer in range(CONFIG.num_hidden_layers):
            shapes |= {
                f"model.layers.{layer}.input_layernorm": (hidden,),
                f"model.layers.{layer}.self_attn.qkv_proj": (sum(self.split), hidden),
                f"model.layers.{layer}.self_attn.o_proj": (hidden, hidden // self.tp.size),
                f"model.layers.{layer}.post_attention_layernorm": (hidden,),
                f"model.layers.{layer}.mlp.gate_up_proj": (2 * inner // self.tp.size, hidden),
                f"model.layers.{layer}.mlp.down_proj": (hidden, inner // self.tp.size),
            }
        self.weights = {f"{name}.weight": torch.empty(shape) for name, shape in shapes.items()}

    def refit(self) -> None:
        """Receive the weights of the trainer."""
        into = self.weights
        transfer_state(self.mapping, into=into, shards=CUTS, fused=FUSED, world=self.world)

    def summed(self, partial: Tensor) -> Tensor:
        """Return the sum over the tensor parallel ranks."""
        dist.all_reduce(partial, group=self.tp.group)
        return partial

    def norm(self, hidden: Tensor, name: str) -> Tensor:
        """Normalise."""
        weight = self.weights[f"{name}.weight"]
        return rms_norm(hidden, weight.shape, weight, CONFIG.rms_norm_eps)

    def logits(self, words: Tensor) -> Tensor:
        """Return the scores of the words that may follow each word."""
        hidden = embedding(words, self.weights["model.embed_tokens.weight"])
        cos, sin = self.rotary(hidden, torch.arange(words.shape[1])[None])
        for number in range(CONFIG.num_hidden_layers):
            layer = f"model.layers.{number}"
            own = {
                name.removeprefix(f"{layer}.").split(".")[-2]: weight
                for name, weight in self.weights.items()
                if name.startswith(f"{layer}.")
            }
            fused = self.norm(hidden, f"{layer}.input_layernorm") @ own["qkv_proj"].T
            q, k, v = (
                one.unflatten(-1, (-1, self.size)).transpose(1, 2)
                for one in fused.split(self.split, -1)
            )
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            hidden = hidden + self.summed(attended.transpose(1, 2).flatten(2) @ own["o_proj"].T)
            fused = self.norm(hidden, f"{layer}.post_attention_layernorm") @ own["gate_up_proj"].T
            gate, up = fused.chunk(2, -1)
            hidden = hidden + self.summed(silu(gate) * up @ own["down_proj"].T)
        own_rows = self.norm(hidden, "model.norm") @ self.weights["lm_head.weight"].T
        scores = torch.zeros(*words.shape, CONFIG.vocab_size)
        scores.tensor_split([-(-CONFIG.vocab_size // 2)], -1)[self.tp.rank].copy_(own_rows)
        return self.summed(scores)


def serve(address: str, rank: int) -> None:
    """Receive the weights of each step, and compare the logits."""
    with (
        join_world(
            address, name="refit", parts=PARTS, part="engine", rank=rank, serve=False
        ) as world,
        GridSet(LAYOUTS, world=world) as grids,
    ):
        engine, largest = Engine(world, grids), 0.0
        for step in range(STEPS):
            engine.refit()
            expected = torch.empty(BATCH, LENGTH, CONFIG.vocab_size)
            dist.broadcast(expected, 0, group=world.pg)
            difference = (engine.logits(data(step)) - expected).abs().max().item()
            largest = max(largest, difference)
            if rank == 0:
                print(f"after step {step + 1} the logits differ by {difference:.1e}", flush=True)
        if rank == 0:
            print(f"largest difference: {largest:.1e}", flush=True)


def main() -> None:
    """Start both jobs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    jobs = [subprocess.Popen([*torchrun, __file__, "trainer", address])]  # noqa: S603
    for rank in range(PARTS["engine"]):
        command = [sys.executable, __file__, "engine", address, str(rank)]
        jobs.append(subprocess.Popen(command))  # noqa: S603
    codes = [job.wait(timeout=300) for job in jobs]
    if any(codes):
        raise SystemExit("a process has failed")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "trainer":
        train(sys.argv[2])
    else:
        serve(sys.argv[2], int(sys.argv[3]))
