"""Private names of torch are a bonus: without any of them groups are created, and are right."""

import statistics
import time

import pytest
import torch
from ranks import private_ranks

from hypercomm import HyperCommGrid
from hypercomm.process_groups.c10d.private_names import PRIVATE_NAMES
from hypercomm.process_groups.c10d.self_checks import PrivateNames
from hypercomm.testing import fake_world, run_ranks

SUMS = {
    0: [11, 101, 11, 1111, 101],
    1: [11, 1010, 11, 1111, 1010],
    2: [1100, 101, 1100, 1111, 101],
    3: [1100, 1010, 1100, 1111, 1010],
}
DUE = [name for name in PRIVATE_NAMES if name.is_due()]


@pytest.fixture(
    scope="module", params=[1, pytest.param(3, marks=pytest.mark.slow)], ids=["missing", "any"]
)
def found(request):
    """What four real ranks received, logged and left over, for each name and way."""
    hows = private_ranks.HOWS[: request.param]
    found = run_ranks(private_ranks.without_each, 4, args=(hows,), timeout=300)
    assert len(found[0]) == 1 + len(hows) * len(DUE) + 3
    return found


# With each name missing, with another signature, or raising, and with all of them gone at once,
# groups are created by public functions, communicate rightly, and leave nothing behind.
@pytest.mark.long
def test_groups_are_right_without_private_names(found):
    for rank, of_rank in enumerate(found):
        for case, (sums, _, _, is_clean) in of_rank.items():
            assert (case, sums) == (case, SUMS[rank])
            assert is_clean, case


# The log says once of each name that was wanted that it is lost, and of no other.
@pytest.mark.long
def test_the_log_says_once_what_is_lost(found):
    for of_rank in found:
        _, lines, wanted, _ = of_rank["nothing", "nothing"]
        assert lines == []
        assert len(wanted) >= 6
        for (case, how), (_, lines, _, _) in of_rank.items():
            for name in DUE:
                told = [
                    line for line in lines if line.startswith(f"torch {torch.__version__}: {name} ")
                ]
                is_lost = case == name.path and name.path in wanted
                if case != "all":
                    assert (case, how, name.path, len(told)) == (case, how, name.path, int(is_lost))
                assert all(line.endswith(f"does without it: {name.without}") for line in told)
        for how in private_ranks.HOWS:
            _, lines, asked, _ = of_rank["all", how]
            told = [line for line in lines if line.startswith("torch ")]
            assert len(told) == len(asked) >= 5


# The table says of each name what a user needs to know, and names each once.
def test_the_table():
    assert len({name.path for name in PRIVATE_NAMES}) == len(PRIVATE_NAMES)
    for name in PRIVATE_NAMES:
        assert all((name.gives, name.checked, name.without))
        assert "._" in name.path or "distributed_c10d" in name.path


# All checks together take less than 2 ms, once what they look at is loaded; what others take of the
# machine meanwhile is not counted.
def test_checks_are_fast():
    with fake_world(8), HyperCommGrid([8], ["dp"]) as grid:
        grid.create_pg("dp")
        PrivateNames(torch, PRIVATE_NAMES).verdicts()  # loads
        times = []
        for _ in range(5):
            begin = time.thread_time()
            verdicts = PrivateNames(torch, PRIVATE_NAMES).verdicts()
            times.append(time.thread_time() - begin)
    assert {verdict.state for verdict in verdicts} <= {"works", "not due"}
    assert statistics.median(times) < 2e-3
