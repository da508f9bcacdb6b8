"""Where ranks hang: which stacks are shown, and for which ranks."""

import sysconfig

import pytest

import hypercomm
from hypercomm.launch.stacks import grouped


def frame(file, line, name):
    return f'  File "{file}", line {line} in {name}'


MAIN, OTHER = frame("/home/me/train.py", 30, "main"), frame("/home/me/train.py", 31, "main")
TORCH = frame(sysconfig.get_path("purelib") + "/torch/distributed/c10d.py", 7, "barrier")
OURS = frame(hypercomm.__path__[0] + "/grid/grid.py", 9, "create_pg")
THREADS = frame(sysconfig.get_path("stdlib") + "/threading.py", 1, "wait")
FROZEN = frame("<frozen importlib._bootstrap>", 1176, "_find_and_load")


# Ranks are together where the user's innermost frame is the same, whatever lies inside of it.
@pytest.mark.torch_free
@pytest.mark.parametrize(
    ("stacks", "together"),
    [
        ([[TORCH, MAIN], [THREADS, TORCH, MAIN], [TORCH, OTHER]], [[0, 1], [2]]),
        ([[TORCH, MAIN], [OURS, MAIN], [MAIN]], [[0, 1, 2]]),
        ([[THREADS, OURS], [TORCH, OURS], [TORCH]], [[0, 1], [2]]),
        ([[FROZEN, MAIN], [MAIN]], [[0, 1]]),
        ([[], [MAIN], []], [[0, 2], [1]]),
        ([[FROZEN], []], [[0], [1]]),
    ],
)
def test_who_is_together(stacks, together):
    assert [ranks for ranks, _ in grouped(dict(enumerate(stacks)))] == together


# Frames of importlib are not shown, but that modules are loaded is.
@pytest.mark.torch_free
def test_what_is_shown():
    [(_, place)] = grouped({3: [THREADS, FROZEN, FROZEN, MAIN]})
    assert place.splitlines() == ["  (it loads modules)", THREADS, MAIN]
    [(_, place)] = grouped({3: []})
    assert place == "  (it does not answer)"
