"""Test ezpz.tp on a grid: groups, states, globals, invalid calls and real ranks."""

import textwrap
from datetime import timedelta

import forked_programs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from group_checks import sum_over, tables as registered
from hypothesis import given, strategies as st

from hypercomm.compat.ezpz import TensorParallelState, tp
from hypercomm.errors import ConfigurationError, StateError
from hypercomm.testing import fake_world

NAMES = ("tensor", "context", "pipeline", "data")
GROUPS = {name: f"_{name.upper()}_PARALLEL_GROUP" for name in NAMES}
RANKS = {name: f"_{name.upper()}_PARALLEL_RANKS" for name in NAMES} | {
    "context": "_CONTEXT_PARALLEL_GROUP_RANKS"
}
GLOBALS = [*GROUPS.values(), *RANKS.values()]


@pytest.fixture(autouse=True)
def destroy_state():
    """Destroy the default state after each test."""
    yield
    tp.destroy_tensor_parallel()


def ask(name, what):
    return getattr(tp, f"get_{name}_parallel_{what}")()


def facts():
    """Return the results of all getters on the calling rank."""
    whats = ("ranks", "rank", "world_size")
    answers = {f"{name} {what}": ask(name, what) for name in NAMES for what in whats}
    answers["src"] = tp.get_tensor_parallel_src_rank()
    for name in NAMES:
        group = ask(name, "group")
        answers[f"{name} group"] = dist.get_process_group_ranks(group)
    return answers


# ---- ranks --------------------------------------------------------------------------------------


@st.composite
def configurations(draw):
    sizes = [draw(st.integers(1, 5)) for _ in range(4)]
    world_size = int(np.prod(sizes))
    return sizes, draw(st.integers(0, world_size - 1))


def lines(world, rank):
    """Map each name to the ranks of a group. As in ezpz, a group is a line through an array."""
    place = np.unravel_index(rank, world.shape)
    axes = enumerate(("data", "pipeline", "context", "tensor"))
    return {
        name: world[(*place[:axis], slice(None), *place[axis + 1 :])].tolist()
        for axis, name in axes
    }


# The ranks of each group are a line through the array of all ranks.
@given(configurations())
def test_groups_match_numpy(configuration):
    (dp, pp, cp, size), rank = configuration
    world = np.arange(dp * pp * cp * size).reshape(dp, pp, cp, size)
    with fake_world(world.size, rank):
        tp.initialize_tensor_parallel(size, pp, cp)
        assert tp.tensor_parallel_is_initialized()
        expected = {"src": rank // size * size}
        for name, ranks in lines(world, rank).items():
            expected |= {f"{name} ranks": ranks, f"{name} group": ranks}
            expected |= {f"{name} rank": ranks.index(rank), f"{name} world_size": len(ranks)}
        assert facts() == expected
        tp.destroy_tensor_parallel()


# A tensor size larger than the world is reduced to the size of the world, with a warning at the
# line of the call.
def test_tensor_size_larger_than_the_world():
    with fake_world(4, rank=3):
        with pytest.warns(UserWarning, match="16") as caught:
            tp.initialize_tensor_parallel(16)
        assert caught[0].filename == __file__
        assert tp.get_tensor_parallel_ranks() == [0, 1, 2, 3]


# ---- state --------------------------------------------------------------------------------------


# Without initialisation, the tensor parallel rank is 0, and the tensor parallel size is 1. Every
# other getter raises AssertionError.
def test_getters_without_initialisation():
    with fake_world(4, rank=2):
        assert not tp.tensor_parallel_is_initialized()
        assert tp.get_tensor_parallel_rank() == 0
        assert tp.get_tensor_parallel_world_size() == 1
        assert tp.get_tensor_parallel_src_rank() == 2
        for name in NAMES:
            for what in ("group", "ranks", "rank", "world_size")[: 2 if name == "tensor" else 4]:
                with pytest.raises(AssertionError, match=f"{name} parallel group is not init"):
                    ask(name, what)


# Without a state, every global is None. With a state, a getter returns the value of its global,
# even if the global was overwritten.
def test_globals_and_getters_agree():
    assert [getattr(tp, name) for name in GLOBALS] == [None] * len(GLOBALS)
    with fake_world(8, rank=5):
        tp.initialize_tensor_parallel(2, 2)
        for name in NAMES:
            group, ranks = GROUPS[name], RANKS[name]
            assert getattr(tp, group) is ask(name, "group")
            assert getattr(tp, ranks) is ask(name, "ranks")
            own = dist.new_group([1, 3, 5])
            setattr(tp, group, own)
            setattr(tp, ranks, [1, 3, 5])
            assert ask(name, "group") is own
            assert ask(name, "rank") == 2, name
            assert ask(name, "world_size") == 3, name
            assert ask(name, "ranks") == [1, 3, 5]
            setattr(tp, group, None)
            assert not tp.tensor_parallel_is_initialized()
        tp.destroy_tensor_parallel()
        assert [getattr(tp, name) for name in GLOBALS] == [None] * len(GLOBALS)


# destroy_tensor_parallel() is idempotent. It destroys the groups of the state, but no group that
# the user created.
def test_destroy_is_idempotent():
    with fake_world(8):
        mine = dist.new_group([0, 1])
        before = registered()
        tp.initialize_tensor_parallel(2, 2)
        groups = [ask(name, "group") for name in NAMES]
        assert set(groups) <= registered()[0]
        tp._DATA_PARALLEL_GROUP = mine
        tp.destroy_tensor_parallel()
        tp.destroy_tensor_parallel()
        assert registered() == before


# ---- invalid calls ------------------------------------------------------------------------------

BAD = [
    {"tensor_parallel_size": 3},
    {"context_parallel_size": True},
    {"data_parallel_backend": "smoke"},
    {"timeout": timedelta(0)},
]


# An invalid argument raises AssertionError with its value and creates nothing. A valid call works.
@pytest.mark.parametrize("arguments", BAD, ids=str)
def test_invalid_arguments(arguments):
    with fake_world(8, rank=6):
        before = registered()
        with pytest.raises(ConfigurationError) as caught:
            tp.initialize_tensor_parallel(**arguments)
        assert str(next(iter(arguments.values()))) in str(caught.value)
        assert [getattr(tp, name) for name in GLOBALS] == [None] * len(GLOBALS)
        assert registered() == before
        tp.initialize_tensor_parallel(2)
        with pytest.raises(StateError, match="_DATA_PARALLEL_GROUP"):
            tp.initialize_tensor_parallel(2)
        assert tp.get_tensor_parallel_ranks() == [6, 7]


def test_without_torch_distributed():
    with pytest.raises(AssertionError, match="init_process_group"):
        TensorParallelState.create()


@pytest.mark.parametrize("contiguous", [False, True])
def test_split_tensor(contiguous):
    tensor = torch.arange(24.0).reshape(2, 2, 6)
    parts = tp.split_tensor_along_last_dim(tensor, 3, contiguous)
    assert isinstance(parts, tuple)
    expected = np.split(tensor.numpy(), 3, axis=-1)
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]
    assert all(part.is_contiguous() == contiguous for part in parts)
    with pytest.raises(AssertionError, match="6 is not divisible by 4"):
        tp.split_tensor_along_last_dim(tensor, 4)


# ---- install() ----------------------------------------------------------------------------------

EZPZ = {
    "ezpz/__init__.py": "NAME = 'ezpz'",
    "ezpz/tp/__init__.py": """
        _GROUP = None
        def tensor_parallel_is_initialized():
            return _GROUP is not None
        def get_tensor_parallel_rank():
            return 'theirs'
    """,
    "ezpz/tp/layers.py": """
        from ezpz.tp import get_tensor_parallel_rank
        def rank():
            return get_tensor_parallel_rank()
    """,
}


INSTALL = """
import importlib.util
from hypercomm.compat.ezpz import install, tp
found = importlib.util.find_spec("ezpz") is not None
install()
install()
import ezpz.tp
from ezpz.tp import get_tensor_parallel_rank
assert ezpz.tp is tp
assert tp.__spec__.name == "hypercomm.compat.ezpz"
assert get_tensor_parallel_rank() == 0
if found:
    import ezpz.tp.layers
    assert (ezpz.NAME, ezpz.tp.layers.rank()) == ("ezpz", 0)
"""


# After install(), all other modules of ezpz use hypercomm's `tp`, even modules inside ezpz.tp.
@pytest.mark.parametrize("has_ezpz", [False, True])
def test_install_replaces_ezpz_tp(tmp_path, has_ezpz):
    for name, text in EZPZ.items() if has_ezpz else ():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    done = forked_programs.run(f"{INSTALL}\nassert found == {has_ezpz}", folder=tmp_path)
    assert done.returncode == 0, done.stderr


# ---- real gloo ranks ----------------------------------------------------------------------------


# An all-reduce over each group reaches exactly its members, even after the state was destroyed and
# initialised again.
@pytest.mark.ranks(8)
def test_every_group_communicates():
    wanted = lines(np.arange(8).reshape(1, 2, 2, 2), dist.get_rank())
    for _ in range(2):
        tp.initialize_tensor_parallel(2, 2, 2, timeout=timedelta(seconds=60))
        for name, ranks in wanted.items():
            assert sum_over(ask(name, "group")) == sum(10**member for member in ranks)
        tp.destroy_tensor_parallel()
        assert registered()[0] == {dist.group.WORLD}
