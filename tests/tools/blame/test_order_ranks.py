"""Real ranks that skip a call whose shape is usual: the rank and the line are found."""

import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tools.blame.dumps import blame

from hypercomm import HyperCommGrid

pytestmark = pytest.mark.long


def watched(folder, steps):
    """Run steps on tp=2,dp=2 under a watch until they end or time out; the verdict, on rank 0."""
    grid = HyperCommGrid("tp=2,dp=2")
    tp, dp = (grid.create_pg(dim, timeout=timedelta(seconds=2)) for dim in ("tp", "dp"))
    dist.barrier()
    try:
        with grid.watch(60, folder):
            steps(dist.get_rank(), tp, dp)
    except RuntimeError:  # timed out, or the other end has timed out
        pass
    dist.barrier()
    return blame(folder) if dist.get_rank() == 0 else None


def line_of(function, text):
    """The line of a text in a function, as it stands in a verdict."""
    lines, first = inspect.getsourcelines(function)
    (place,) = [first + index for index, line in enumerate(lines) if text in line]
    return f"{__file__}:{place} in {function.__name__}"


def skip_one_of_equal_shape(rank, tp, dp):
    for step in range(10):
        dist.all_reduce(torch.ones(4), group=tp)  # over tp
        if not (rank == 1 and step == 5):
            dist.all_reduce(torch.ones(4), group=dp)  # over dp


# Rank 1 skips a call over dp at step 5. It pairs with the next one, so that all goes on to the
# end, where rank 3 waits: the order across the groups of rank 1 shows the place.
@pytest.mark.ranks(4)
def test_a_skip_of_equal_shape(tmp_path):
    verdict = watched(tmp_path, skip_one_of_equal_shape)
    if verdict is None:
        return
    assert (verdict.outcome, verdict.culprits) == ("blamed", (1,)), str(verdict)
    (finding,) = verdict.findings
    assert (finding.kind, finding.waiting) == ("order", (3,))
    over_tp, over_dp = (line_of(skip_one_of_equal_shape, f"# over {dim}") for dim in ("tp", "dp"))
    assert finding.says.startswith("rank 1 (tp=1, dp=0; host ")
    assert f"calls all_reduce number 7 of tp (ranks 0..1) at {over_tp} right after" in finding.says
    assert f"after all_reduce number 6 of tp (ranks 0..1) at {over_tp}, where" in finding.says
    assert f"most ranks call all_reduce over dp (rank 0 at {over_dp})" in finding.says


def skip_before_a_barrier(rank, tp, dp):
    for step in range(4):
        dist.all_reduce(torch.ones(4), group=tp)
        if not (rank == 1 and step == 3):
            dist.all_reduce(torch.ones(4), group=dp)  # the usual call
        dist.barrier(group=dp)  # the odd call


# Members of one dp group call different collectives as number 7; the other dp group decides.
@pytest.mark.ranks(4)
def test_sibling_groups(tmp_path):
    verdict = watched(tmp_path, skip_before_a_barrier)
    if verdict is None:
        return
    assert (verdict.outcome, verdict.culprits) == ("blamed", (1,)), str(verdict)
    (finding,) = verdict.findings
    assert finding.kind == "order"
    odd, usual = (line_of(skip_before_a_barrier, f"# the {what}") for what in ("odd", "usual"))
    assert f"calls barrier number 7 of dp (ranks 1, 3) at {odd}, but rank 3 calls" in finding.says
    assert f"at {usual}; so do ranks 0, 2 in the other dp groups" in finding.says
