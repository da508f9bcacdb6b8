"""install() and uninstall(), each in a fresh interpreter: what is imported when decides all."""

import textwrap

import fresh_programs
import pytest

QUICK = """
import sys, torch, warnings
warnings.simplefilter("ignore")
torch.compile = lambda function=None, **_: function or (lambda given: given)
"""
"""Megatron compiles some functions when it is imported, which loads inductor: two seconds."""
HIDE = """
import sys
from importlib.machinery import PathFinder

class WithoutMegatron(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.startswith("megatron") else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutMegatron
"""
OURS = """
from hypercomm.compat.megatron import install, uninstall
from hypercomm.compat.megatron import hyper_comm_grid, parallel_state, process_groups_config
"""
RESOLVES = """
import megatron.core
import megatron.core.hyper_comm_grid, megatron.core.parallel_state
import megatron.core.process_groups_config
from megatron.core import mpu, parallel_state as state
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.process_groups_config import ProcessGroupCollection
assert state is mpu is parallel_state is megatron.core.parallel_state is megatron.core.mpu
assert megatron.core.hyper_comm_grid is hyper_comm_grid
assert megatron.core.process_groups_config is process_groups_config
assert get_tensor_model_parallel_rank is parallel_state.get_tensor_model_parallel_rank
assert ProcessGroupCollection is process_groups_config.ProcessGroupCollection
assert parallel_state.__name__ == parallel_state.__spec__.name
"""
HELD = """
import types

def held_by_megatron():
    return {
        getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", "")
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "megatron" and isinstance(module, types.ModuleType)
        if module not in (parallel_state, hyper_comm_grid, process_groups_config)
        for value in list(vars(module).values())
        if isinstance(value, (types.ModuleType, types.FunctionType, type))
    }
"""


def run(*parts):
    program = "\n".join([QUICK, *map(textwrap.dedent, parts)])
    return fresh_programs.run(program)


def succeeds(*parts):
    done = run(*parts)
    assert done.returncode == 0, done.stderr


# Installed first, Megatron's own modules come up with ours in place of the three.
@pytest.mark.long
def test_before_megatron():
    succeeds(
        OURS,
        "install(); install()",
        RESOLVES,
        HELD,
        """
        import megatron.core.optimizer, megatron.core.tensor_parallel.layers as layers
        assert not {"megatron.core.parallel_state", "megatron.core.hyper_comm_grid",
                    "megatron.core.process_groups_config"} & held_by_megatron()
        uninstall(); uninstall()
        assert not {name for name in held_by_megatron() if (name or "").startswith("hypercomm")}
        import megatron.core.parallel_state as theirs
        assert theirs is megatron.core.mpu and theirs.__name__ == "megatron.core.parallel_state"
        assert layers.get_tensor_model_parallel_rank is theirs.get_tensor_model_parallel_rank
        """,
    )


# Installed later, what holds one of the old modules, functions or classes holds ours, in modules of
# Megatron's and of the user; uninstalled, each has its own again.
@pytest.mark.long
def test_after_megatron():
    succeeds(
        """
        import types
        import megatron.core, megatron.core.optimizer, megatron.core.hyper_comm_grid
        import megatron.core.tensor_parallel.layers as layers
        old = megatron.core.parallel_state
        user = types.ModuleType("user")
        user.mpu, user.rank = old, old.get_tensor_model_parallel_rank
        sys.modules["user"] = user
        """,
        OURS,
        "install()",
        RESOLVES,
        HELD,
        """
        assert user.mpu is parallel_state
        assert user.rank is parallel_state.get_tensor_model_parallel_rank
        assert layers.get_tensor_model_parallel_rank is user.rank
        assert not {"megatron.core.parallel_state", "megatron.core.hyper_comm_grid",
                    "megatron.core.process_groups_config"} & held_by_megatron()
        uninstall()
        assert user.mpu is old and user.rank is old.get_tensor_model_parallel_rank
        assert megatron.core.parallel_state is megatron.core.mpu is old
        assert sys.modules["megatron.core.parallel_state"] is old
        assert not {name for name in held_by_megatron() if (name or "").startswith("hypercomm")}
        """,
    )


# Without megatron-core the three modules are there all the same, and nothing else is.
def test_without_megatron():
    succeeds(
        HIDE,
        OURS,
        "install()",
        RESOLVES,
        """
        try:
            import megatron.core.tensor_parallel
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError
        uninstall()
        assert not [name for name in sys.modules if name.startswith("megatron")]
        install()
        """,
        RESOLVES,
    )


# What cannot be replaced is named, and nothing is changed.
@pytest.mark.long
@pytest.mark.parametrize(
    ("obstacle", "sentence"),
    [
        (
            """
            import torch.distributed as dist
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            old.initialize_model_parallel()
            """,
            "megatron.core.parallel_state is initialised; call its destroy_model_parallel()",
        ),
        (
            "class Mine(config.ProcessGroupCollection): pass",
            "<class '__main__.Mine'> derives from ProcessGroupCollection",
        ),
        (
            """
            old.get_my_own_group = lambda: None
            old.get_my_own_group.__module__ = old.__name__
            from megatron.core.parallel_state import get_my_own_group
            """,
            "__main__ holds get_my_own_group, which hypercomm does not have",
        ),
    ],
)
def test_obstacles(obstacle, sentence):
    begin = """
    import megatron.core
    from megatron.core import parallel_state as old, process_groups_config as config
    """
    done = run(
        begin,
        obstacle,
        OURS,
        """
from hypercomm.errors import InstallError
before = dict(sys.modules), list(sys.meta_path), dict(vars(megatron.core))
try:
    install()
except InstallError as error:
    print(error)
assert (dict(sys.modules), list(sys.meta_path), dict(vars(megatron.core))) == before
assert megatron.core.parallel_state is old
        """,
    )
    assert done.returncode == 0, done.stderr
    assert sentence in done.stdout
    assert "call install() before it is imported" in done.stdout


# Where megatron.core's own state is loaded beside ours, its layers would find no groups: that is
# said, once, and not where `install` has put ours in its place, or nothing of megatron is loaded.
def test_two_states():
    succeeds(
        OURS,
        """
        import warnings
        from hypercomm.compat.megatron import MegatronNotReplacedWarning
        from hypercomm.testing import fake_world

        def told():
            with fake_world(2), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("default")
                for _ in range(2):
                    parallel_state.initialize_model_parallel()
                    parallel_state.destroy_model_parallel()
            return [one for one in caught if one.category is MegatronNotReplacedWarning]

        assert told() == []
        import megatron.core
        (warning,) = told()
        assert "call hypercomm.compat.megatron.install() before" in str(warning.message)
        install()
        assert told() == []
        """,
    )


# A state that is still initialised keeps the modules that would lose it.
def test_uninstall_too_early():
    succeeds(
        OURS,
        """
        from hypercomm.errors import InstallError
        from hypercomm.testing import fake_world
        install()
        with fake_world(2):
            parallel_state.initialize_model_parallel()
            try:
                uninstall()
            except InstallError as error:
                assert "destroy_model_parallel" in str(error)
            else:
                raise AssertionError
            parallel_state.destroy_model_parallel()
            uninstall()
        """,
    )


# ... and as long as a state is in use, which may be a live one.
def test_uninstall_in_a_scope():
    succeeds(
        OURS,
        """
        from hypercomm.compat.megatron import ParallelState
        from hypercomm.errors import InstallError
        install()
        with parallel_state.use(ParallelState()):
            try:
                uninstall()
            except InstallError as error:
                assert "leave it first" in str(error)
            else:
                raise AssertionError
        uninstall()
        """,
    )
