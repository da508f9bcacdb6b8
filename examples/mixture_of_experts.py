"""A mixture of experts. The router uses cp and dp. The experts use ep in a view of the same ranks.

    python examples/mixture_of_experts.py

Trains on 8 local ranks with cp=2, dp=4 and ep=4, and on one process, and compares the losses.
"""

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from hypercomm import HyperCommGrid, run_ranks
from hypercomm.grid.dims import GridDims

WIDTH, EXPERTS, TOKENS, STEPS = 16, 8, 256, 5


class Experts(nn.Module):
    """Sends each token to the rank of the expert with the highest gate."""

    def __init__(self, ep: GridDims) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ep, self.router = ep, nn.Linear(WIDTH, EXPERTS)
        experts = torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
        self.weights = nn.Parameter(experts.chunk(ep.size)[ep.rank].clone())

    def forward(self, tokens: Tensor) -> Tensor:
        gates, chosen = self.router(tokens).softmax(-1).max(-1)
        order, counts = chosen.argsort(), chosen.bincount(minlength=EXPERTS)
        coming = collectives.all_to_all_single(counts, None, None, self.ep.group)
        sizes = [each.view(self.ep.size, -1).sum(1).tolist() for each in (coming, counts)]
        rows = self.exchange(tokens[order], *sizes)
        experts = torch.arange(EXPERTS) % len(self.weights)  # the expert of each count in `coming`
        rows = (rows[:, None] @ self.weights[experts.repeat_interleave(coming)])[:, 0].relu()
        rows = self.exchange(rows, *reversed(sizes))
        return tokens + gates[:, None] * rows[order.argsort()]

    def exchange(self, rows: Tensor, receives: list[int], sends: list[int]) -> Tensor:
        """Send rows to the ranks of ep. The gradients of the rows return the same way."""
        return collectives.all_to_all_single_autograd(rows, receives, sends, self.ep.group)


def train(ep: int, sizes: str) -> list[float]:
    """Train each rank on its share of the tokens. Return the losses."""
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    with HyperCommGrid(sizes) as grid:
        grid.register_view("expert", [ep, grid.size // ep], ["ep", "expt_dp"])
        dense, expert = grid["cp", "dp"], grid.view("expert")
        model = Experts(expert["ep"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(STEPS):
            tokens = torch.randn(TOKENS, WIDTH, generator=generator).chunk(grid.size)[dense.rank]
            loss = (model(tokens) - tokens.roll(1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            for weight in model.router.parameters():
                assert weight.grad is not None
                weight.grad = dense.mean(weight.grad)
            assert model.weights.grad is not None
            model.weights.grad = expert["expt_dp"].sum(model.weights.grad) / grid.size
            optimizer.step()
            losses.append(dense.mean(loss.detach()).item())
    return losses


if __name__ == "__main__":
    [wanted] = run_ranks(train, 1, args=(1, "cp=1,dp=1"))
    ranks = run_ranks(train, 8, args=(4, "cp=2,dp=4"))
    difference = max(abs(a - b) for losses in ranks for a, b in zip(losses, wanted, strict=True))
    print(f"losses: {' '.join(f'{loss:.4f}' for loss in wanted)}")
    print(f"largest difference: {difference:.1e}")
