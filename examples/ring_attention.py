"""Ring attention over cp: each rank keeps its queries, and sends keys and values to the next rank.

    python examples/ring_attention.py

Computes attention on 8 local ranks with cp=4,dp=2, forwards and backwards, and compares with one
process.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hypercomm import HyperCommGrid, run_ranks
from hypercomm.grid.dims import GridDims


class Turn(torch.autograd.Function):
    """Sends a tensor to the next rank of the ring. Its gradient takes the opposite direction."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ring: GridDims, *, back: bool = False) -> Tensor:
        ctx.ring, received = ring, torch.empty_like(tensor)
        ranks = ring.next(periodic=True), ring.prev(periodic=True)  # ranks of WORLD
        to, source = reversed(ranks) if back else ranks
        send = dist.P2POp(dist.isend, tensor.contiguous(), to, ring.group)
        receive = dist.P2POp(dist.irecv, received, source, ring.group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Turn.forward(ctx, gradient.contiguous(), ctx.ring, back=True), None


def attend(q: Tensor, kv: Tensor, ring: GridDims) -> Tensor:
    """Return causal attention over the keys and values of all ranks, with an online softmax."""
    top = torch.full_like(q[..., :1], -torch.inf)
    weight, total = torch.zeros_like(top), torch.zeros_like(q)
    places = torch.arange(q.size(-2))
    for step in range(ring.size):
        ahead = (ring.rank - step) % ring.size - ring.rank  # offset to the owner of the keys
        hidden = places + ahead * len(places) > places[:, None]
        scores = (q @ kv[0].mT / q.size(-1) ** 0.5).masked_fill(hidden, -torch.inf)
        new_top = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        part, fade = (scores - new_top).exp(), (top - new_top).exp()
        weight, total = weight * fade + part.sum(-1, keepdim=True), total * fade + part @ kv[1]
        top, kv = new_top, Turn.apply(kv, ring) if step + 1 < ring.size else kv
    return total / weight


def on_a_grid() -> float:
    """Compute attention with cp=4,dp=2. Return the difference of outputs and gradients."""
    whole = torch.randn(3, 4, 2, 32, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = whole.requires_grad_()
    wanted = scaled_dot_product_attention(q, k, v, is_causal=True)
    [wanted_gradient] = torch.autograd.grad(wanted.square().sum(), whole)
    with HyperCommGrid("cp=4,dp=-1") as grid:
        cp, dp = grid["cp"], grid["dp"]

        def mine(tensor: Tensor) -> Tensor:  # this rank's part of the batch and of the sequence
            return tensor.detach().chunk(dp.size, -4)[dp.rank].chunk(cp.size, -2)[cp.rank]

        qkv = mine(whole).clone().requires_grad_()
        got = attend(qkv[0], qkv[1:], cp)
        [gradient] = torch.autograd.grad(got.square().sum(), qkv)
        pairs = (got, mine(wanted)), (gradient, mine(wanted_gradient))
        return max((one - other).abs().max().item() for one, other in pairs)


if __name__ == "__main__":
    print(f"largest difference: {max(run_ranks(on_a_grid, 8)):.1e}")
