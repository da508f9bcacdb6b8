"""ezpz.tp on a grid: the seed's examples, all sizes against numpy, states, globals, bad calls."""

import functools
import textwrap
from datetime import timedelta

import fresh_programs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks.rank_functions import registered

from hypercomm.compat.ezpz import tp
from hypercomm.compat.ezpz.tp import TensorParallelState
from hypercomm.testing import fake_world

NAMES = ("tensor", "context", "pipeline", "data")
DIMS = dict(zip(NAMES, ("tp", "cp", "pp", "dp"), strict=True))
GLOBALS = [
    "_TENSOR_PARALLEL_GROUP",
    "_TENSOR_PARALLEL_RANKS",
    "_DATA_PARALLEL_GROUP",
    "_DATA_PARALLEL_RANKS",
    "_PIPELINE_PARALLEL_GROUP",
    "_PIPELINE_PARALLEL_RANKS",
    "_CONTEXT_PARALLEL_GROUP",
    "_CONTEXT_PARALLEL_GROUP_RANKS",
]


@pytest.fixture(autouse=True)
def no_state_is_left():
    """Empty the default state, whatever a test did."""
    yield
    tp.destroy_tensor_parallel()


def ask(name, what):
    return getattr(tp, f"get_{name}_parallel_{what}")()


def facts():
    """All that the getters say to the calling rank."""
    whats = ("ranks", "rank", "world_size")
    answers = {f"{name} {what}": ask(name, what) for name in NAMES for what in whats}
    answers["src"] = tp.get_tensor_parallel_src_rank()
    for name in NAMES:
        group = ask(name, "group")
        answers[f"{name} group"] = dist.get_process_group_ranks(group)
    return answers


# ---- ranks --------------------------------------------------------------------------------------

EIGHT = {
    "tensor": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "data": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "context": [[rank] for rank in range(8)],
    "pipeline": [[rank] for rank in range(8)],
}
# fmt: off
SIXTEEN = {
    "tensor": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
    "context": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "pipeline": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
    "data": [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
}
# fmt: on


# The two examples of ezpz's documentation. What it prints for data and pipeline in the second are
# those of its older numbering, with the slip of a rank 16; its code makes these.
@pytest.mark.parametrize(
    ("sizes", "table"), [((2,), EIGHT), ((2, 2, 2), SIXTEEN)], ids=["8 ranks", "16 ranks"]
)
def test_documented_groups(sizes, table):
    world_size = sum(map(len, table["tensor"]))
    for rank in range(world_size):
        with fake_world(world_size, rank):
            tp.initialize_tensor_parallel(*sizes)
            for name, groups in table.items():
                assert ask(name, "ranks") == next(group for group in groups if rank in group)
            tp.destroy_tensor_parallel()


@st.composite
def configurations(draw):
    sizes = [draw(st.integers(1, 5)) for _ in range(4)]
    world_size = int(np.prod(sizes))
    return sizes, draw(st.integers(0, world_size - 1))


# The world is an array over (dp, pp, cp, tp), as ezpz builds it: a group is a line through it.
@given(configurations())
def test_all_sizes(configuration):
    (dp, pp, cp, size), rank = configuration
    world = np.arange(dp * pp * cp * size).reshape(dp, pp, cp, size)
    place = np.unravel_index(rank, world.shape)
    with fake_world(world.size, rank):
        tp.initialize_tensor_parallel(size, pp, cp)
        assert tp.tensor_parallel_is_initialized()
        expected = {}
        for axis, name in enumerate(("data", "pipeline", "context", "tensor")):
            line = tuple(slice(None) if at == axis else place[at] for at in range(4))
            ranks = world[line].tolist()
            expected |= {
                f"{name} ranks": ranks,
                f"{name} rank": place[axis],
                f"{name} world_size": len(ranks),
                f"{name} group": ranks,
            }
        assert facts() == expected | {"src": rank // size * size}
        tp.destroy_tensor_parallel()


# A tensor size above the world is cut to it, and the warning has both numbers.
def test_tensor_size_above_the_world():
    with fake_world(4, rank=3):
        with pytest.warns(
            UserWarning, match=r"tensor_parallel_size=16 .* 4 ranks; using 4"
        ) as caught:
            tp.initialize_tensor_parallel(16)
        assert caught[0].filename == __file__  # where the call is
        assert tp.get_tensor_parallel_ranks() == [0, 1, 2, 3]
        assert tp.get_data_parallel_world_size() == 1


# ---- state --------------------------------------------------------------------------------------


# Uninitialised, the tensor rank is 0 of 1; every other getter is an AssertionError.
@pytest.mark.parametrize("world", [False, True])
def test_uninitialised(world):
    def look():
        assert not tp.tensor_parallel_is_initialized()
        assert (tp.get_tensor_parallel_rank(), tp.get_tensor_parallel_world_size()) == (0, 1)
        for name in NAMES:
            for what in ("group", "ranks", "rank", "world_size"):
                if (name, what) in {("tensor", "rank"), ("tensor", "world_size")}:
                    continue
                with pytest.raises(AssertionError, match=f"{name} parallel group is not init"):
                    ask(name, what)

    if not world:
        look()
        return
    with fake_world(4, rank=2):
        look()
        assert tp.get_tensor_parallel_src_rank() == 2
        tp.initialize_tensor_parallel(2)
        tp.destroy_tensor_parallel()
        look()


# Every global is None at rest, is what the getters answer, and is followed when it is written.
def test_globals():
    assert [getattr(tp, name) for name in GLOBALS] == [None] * len(GLOBALS)
    with fake_world(8, rank=5):
        tp.initialize_tensor_parallel(2, 2)
        for name, dim in DIMS.items():
            group, ranks = (item for item in GLOBALS if item.startswith(f"_{name.upper()}_"))
            assert getattr(tp, group) is ask(name, "group")
            assert getattr(tp, ranks) is ask(name, "ranks")
            own = dist.new_group([1, 3, 5])
            setattr(tp, group, own)
            setattr(tp, ranks, [1, 3, 5])
            assert ask(name, "group") is own
            assert (ask(name, "rank"), ask(name, "world_size")) == (2, 3), dim
            assert ask(name, "ranks") == [1, 3, 5]
            setattr(tp, group, None)
            assert not tp.tensor_parallel_is_initialized()
        tp.destroy_tensor_parallel()
        assert [getattr(tp, name) for name in GLOBALS] == [None] * len(GLOBALS)


# Two states live side by side; a state of its own touches no global.
def test_two_states():
    with fake_world(8, rank=3):
        tp.initialize_tensor_parallel(2)
        with TensorParallelState.create(tensor_parallel_size=4) as state:
            with pytest.warns(RuntimeWarning, match="2 states alive"):
                assert tp.get_tensor_parallel_world_size() == 2
            with tp.use(state):
                assert tp.get_tensor_parallel_ranks() == [0, 1, 2, 3]
                assert tp._DATA_PARALLEL_RANKS == [3, 7]
            assert tp.get_tensor_parallel_ranks() == [2, 3]
        tp.destroy_tensor_parallel()


# Destroying takes the groups away, may be done twice, and spares what it did not create.
def test_destroy():
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


# ---- bad calls ----------------------------------------------------------------------------------

BAD = [
    (
        {"tensor_parallel_size": 3},
        (
            "pipeline_parallel_size=1 = 3 does not divide the world of 8 ranks; what would do: "
            "tensor_parallel_size of 2 or 4"
        ),
    ),
    ({"tensor_parallel_size": 4, "pipeline_parallel_size": 4}, " = 16 does not divide the world"),
    ({"context_parallel_size": 5}, "context_parallel_size=5"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1, got 0"),
    ({"pipeline_parallel_size": -2}, "pipeline_parallel_size must be at least 1, got -2"),
    ({"context_parallel_size": 0}, "context_parallel_size must be at least 1, got 0"),
    ({"tensor_parallel_size": 2.0}, "tensor_parallel_size must be an int, got 2.0"),
    ({"pipeline_parallel_size": "2"}, "pipeline_parallel_size must be an int, got '2'"),
    ({"context_parallel_size": True}, "context_parallel_size must be an int, got True"),
    ({"tensor_parallel_size": None}, "tensor_parallel_size must be an int, got None"),
    ({"data_parallel_backend": "smoke"}, "unknown backend 'smoke'"),
    ({"tensor_parallel_backend": 3}, "backend must be a name"),
    ({"timeout": 30}, "timeout must be a datetime.timedelta, got 30"),
    ({"timeout": timedelta(0)}, "timeout must be longer than 0"),
]


# What is refused is an AssertionError with the numbers, leaves nothing, and a good call follows.
@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=[str(bad) for bad, _ in BAD])
def test_bad_initialisation(arguments, sentence):
    with fake_world(8, rank=6):
        before = registered()
        with pytest.raises(AssertionError) as caught:
            tp.initialize_tensor_parallel(**arguments)
        assert sentence in str(caught.value)
        assert [getattr(tp, name) for name in GLOBALS] == [None] * len(GLOBALS)
        assert registered() == before
        tp.initialize_tensor_parallel(2)
        assert tp.get_tensor_parallel_ranks() == [6, 7]
        with pytest.raises(AssertionError, match="already initialized: _DATA_PARALLEL_GROUP is"):
            tp.initialize_tensor_parallel(2)
        assert tp.get_tensor_parallel_ranks() == [6, 7]


# NCCL is planned for in a fake world, whether or not this build of torch has it.
def test_a_backend_that_this_machine_may_lack():
    with fake_world(8, rank=6):
        tp.initialize_tensor_parallel(2, context_parallel_size=2, context_parallel_backend="nccl")
        assert tp.get_context_parallel_ranks() == [4, 6]


def test_without_torch_distributed():
    with pytest.raises(AssertionError, match="init_process_group"):
        tp.initialize_tensor_parallel()
    with pytest.raises(AssertionError, match="init_process_group"):
        TensorParallelState.create()


def test_unknown_argument_of_a_state():
    with fake_world(2), pytest.raises(TypeError, match=r"'tensor_size'.*'tensor_parallel_size'"):
        TensorParallelState.create(tensor_size=2)


# A creation that fails half-way takes back what was created.
def test_failure_half_way(monkeypatch):
    with fake_world(8):
        before = registered()
        helper = dist.distributed_c10d._new_process_group_helper
        calls = []

        @functools.wraps(helper)
        def failing(*args, **kwargs):
            calls.append(kwargs["group_name"])
            if len(calls) == 3:
                raise RuntimeError("the network is down")
            return helper(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(dist.distributed_c10d, "_new_process_group_helper", failing)
            with pytest.raises(RuntimeError, match="the network is down"):
                tp.initialize_tensor_parallel(2, 2)
        assert len(calls) == 3
        assert registered() == before
        assert not tp.tensor_parallel_is_initialized()
        tp.initialize_tensor_parallel(2, 2)


# ---- arithmetic ---------------------------------------------------------------------------------


@given(st.integers(-99, 99), st.integers(-9, 9))
def test_divisibility(numerator, denominator):
    if denominator and numerator % denominator == 0:
        tp.ensure_divisibility(numerator, denominator)
        assert tp.divide_and_check_no_remainder(numerator, denominator) * denominator == numerator
        return
    for check in (tp.ensure_divisibility, tp.divide_and_check_no_remainder):
        with pytest.raises(AssertionError, match=f"^{numerator} is not divisible by {denominator}"):
            check(numerator, denominator)


@pytest.mark.parametrize("contiguous", [False, True])
def test_split_tensor(contiguous):
    tensor = torch.arange(24.0).reshape(2, 2, 6)
    parts = tp.split_tensor_along_last_dim(tensor, 3, contiguous)
    assert isinstance(parts, tuple)
    expected = np.split(tensor.numpy(), 3, axis=-1)
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]
    assert [part.is_contiguous() for part in parts] == [contiguous] * 3
    with pytest.raises(AssertionError, match="6 is not divisible by 4"):
        tp.split_tensor_along_last_dim(tensor, 4)


# ---- the import path ----------------------------------------------------------------------------

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


def run(tmp_path, program, *, with_ezpz=True):
    for name, text in EZPZ.items() if with_ezpz else ():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    done = fresh_programs.run(textwrap.dedent(program), folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_install_without_ezpz(tmp_path):
    run(
        tmp_path,
        """
        import importlib.util
        assert importlib.util.find_spec("ezpz") is None
        from hypercomm.compat import ezpz as compat
        compat.install()
        compat.install()
        import ezpz.tp
        from ezpz import tp
        from ezpz.tp import get_tensor_parallel_rank
        assert ezpz.tp is tp is compat.tp
        assert tp.__spec__.name == "hypercomm.compat.ezpz.tp"
        assert get_tensor_parallel_rank() == 0
        """,
        with_ezpz=False,
    )


# After install() ezpz's other modules, also those within ezpz.tp, use ours.
def test_install_before_ezpz(tmp_path):
    run(
        tmp_path,
        """
        from hypercomm.compat.ezpz import install, tp
        install()
        import ezpz
        import ezpz.tp.layers
        assert (ezpz.NAME, ezpz.tp, ezpz.tp.layers.rank()) == ("ezpz", tp, 0)
        """,
    )


# After an import of ezpz, install() raises and changes nothing.
def test_install_too_late(tmp_path):
    run(
        tmp_path,
        """
        import sys
        import ezpz.tp
        from hypercomm.compat.ezpz import install, tp
        from hypercomm.errors import InstallError

        theirs, finders = ezpz.tp, list(sys.meta_path)
        try:
            install()
        except InstallError as error:
            assert "before the first import of ezpz" in str(error)
        else:
            raise AssertionError
        assert sys.modules["ezpz.tp"] is ezpz.tp is theirs is not tp
        assert sys.meta_path == finders
        """,
    )
