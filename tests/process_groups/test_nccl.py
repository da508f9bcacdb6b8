"""NCCL itself, several ranks on one card: runs where a GPU is found (pytest -m gpu).

What reaches NCCL is recorded without a GPU by test_nccl_calls.py.
"""

import pytest
import torch
from ranks import gpu_ranks

from hypercomm.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU"),
]

SUMS = {0: [11, 101], 1: [11, 1010], 2: [1100, 101], 3: [1100, 1010]}


def on_one_card(function, *args):
    """Run four ranks that NCCL takes for four hosts."""
    return run_ranks(function, 4, args=args, timeout=180)


# Every way of creating groups that works here gives groups whose sums are right, on a WORLD that is
# bound to a device and on one that is not, and leaves nothing behind.
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("creation", ["auto", "local", "enumerate"])
def test_groups(bound, creation):
    for rank, (sums, is_clean) in enumerate(on_one_card(gpu_ranks.groups, bound, creation)):
        assert sums == SUMS[rank]
        assert is_clean


# A grid at an offset is created by its members alone, while the others sleep.
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("lazy_init", [None, True, False])
def test_nobody_outside_is_waited_for(bound, lazy_init):
    got = on_one_card(gpu_ranks.members_alone, bound, lazy_init)
    for rank, (total, took_s, every) in enumerate(got):
        assert (total, every) == (1100 if rank >= 2 else None, 1111)
        assert rank < 2 or took_s < gpu_ranks.ASLEEP_S


# A WORLD of gloo and NCCL gives groups of both, and of each.
def test_a_mixed_world():
    for rank, found in enumerate(on_one_card(gpu_ranks.mixed)):
        own = [101, 1010][rank % 2]
        assert found == {"both": [own, own], "nccl": [None, own], "gloo": [own, None]}


# abort() ends a grid whose collective waits for a rank that will not come.
def test_abort():
    for took_s, was_pending, left in on_one_card(gpu_ranks.abort)[1:]:
        assert was_pending
        assert took_s < 10
        assert left == 0
