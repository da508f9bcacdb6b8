"""Test install() in new processes, because the order of imports decides the outcome."""

import textwrap

import forked_programs
import pytest

QUICK = """
import sys, torch, warnings
warnings.simplefilter("ignore")
torch.compile = lambda function=None, **_: function or (lambda given: given)
"""
"""Megatron compiles functions during its import, which would load inductor (2 s)."""
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
from hypercomm.compat.megatron import install
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
    return forked_programs.run(program)


def succeeds(*parts):
    done = run(*parts)
    assert done.returncode == 0, done.stderr


# After install(), Megatron's other modules are imported with hypercomm's three modules.
@pytest.mark.full
def test_install_before_megatron():
    succeeds(
        OURS,
        "install(); install()",
        RESOLVES,
        HELD,
        """
        import megatron.core.optimizer, megatron.core.tensor_parallel.layers as layers
        assert not {"megatron.core.parallel_state", "megatron.core.hyper_comm_grid",
                    "megatron.core.process_groups_config"} & held_by_megatron()
        rank = parallel_state.get_tensor_model_parallel_rank
        assert layers.get_tensor_model_parallel_rank is rank
        """,
    )


# Without megatron-core, the three modules can be imported, but no other modules of Megatron.
def test_install_without_megatron():
    succeeds(
        HIDE,
        OURS,
        "install()",
        RESOLVES,
        """
        import pytest
        with pytest.raises(ModuleNotFoundError):
            import megatron.core.tensor_parallel
        """,
    )


# After an import of megatron.core, install() raises and changes nothing.
def test_install_after_megatron_raises():
    succeeds(
        """
        import types
        sys.modules["megatron"] = types.ModuleType("megatron")
        sys.modules["megatron.core"] = types.ModuleType("megatron.core")
        """,
        OURS,
        """
        import pytest
        from hypercomm.errors import StateError
        before = dict(sys.modules), list(sys.meta_path)
        with pytest.raises(StateError, match="before the first import of megatron.core"):
            install()
        assert (dict(sys.modules), list(sys.meta_path)) == before
        """,
    )


# If megatron.core was imported without install(), there is one warning. Otherwise there is none.
@pytest.mark.full
@pytest.mark.parametrize("way", ["none", "theirs", "ours"])
def test_warning_without_install(way):
    succeeds(
        OURS,
        f"way = {way!r}",
        """
        from hypercomm.compat.megatron import MegatronNotReplacedWarning
        from hypercomm.testing import fake_world
        if way == "ours":
            install()
        if way != "none":
            import megatron.core
        with fake_world(2), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                parallel_state.initialize_model_parallel()
                parallel_state.destroy_model_parallel()
        found = [one for one in caught if one.category is MegatronNotReplacedWarning]
        assert len(found) == (way == "theirs")
        assert all("hypercomm.compat.megatron.install()" in str(one.message) for one in found)
        """,
    )
