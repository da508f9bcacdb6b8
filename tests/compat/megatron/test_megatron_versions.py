"""Which megatron-core is followed, what a newer one has more, and half an install."""

import ast
import inspect
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import fresh_programs
import pytest
import torch.distributed as dist
from megatron_facts import ours, plain, theirs
from oracle import core as their_core

from hypercomm.compat.megatron import ParallelState
from hypercomm.compat.megatron.releases import sources, version
from hypercomm.errors import ConfigurationError
from hypercomm.testing import fake_world

INSTALLED = ".".join(their_core.__version__.split(".")[:3])
THEIR_FOLDER = Path(their_core.__file__).parent


# The version is that of the megatron-core that can be imported, until another is set.
def test_version():
    assert version.get() == INSTALLED
    with version.use("0.17"):
        assert version.get() == "0.17.0"
        with version.use("0.20.1"):
            assert (version.get(), version.current()) == ("0.20.1", (0, 20, 1))
        assert version.get() == "0.17.0"
    version.set("0.18.2")
    assert version.get() == "0.18.2"
    version.set(None)
    assert version.get() == INSTALLED


# A release candidate counts as its release.
@pytest.mark.parametrize(
    "text", ["0.17.0rc0", "0.17.0.dev3", "0.17", "0.17.0+local", "0.17.0.post1"]
)
def test_releases(text):
    with version.use(text):
        assert version.get() == "0.17.0"


@pytest.mark.parametrize("wrong", ["", "0", "0.x", "1.2.3.4", "v0.19", 0.19, (0, 19), None])
def test_no_version(wrong):
    before = version.get()
    if wrong is not None:
        with pytest.raises(ConfigurationError, match=r"such as '0\.16\.1' or '0\.19'"):
            version.set(wrong)
    with pytest.raises(ConfigurationError), version.use(wrong if wrong is not None else "x.y"):
        pass
    assert version.get() == before


# What differs between versions: the default data parallel group, and the numbers of get_all_ranks.
def test_changes():
    with fake_world(8):
        for release, numbers, name in [
            ("0.16.1", 5, "_DATA_PARALLEL_GROUP"),
            ("0.18.2", 5, "_DATA_PARALLEL_GROUP"),
            ("0.19.0", 6, "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"),
        ]:
            with version.use(release), ParallelState.create() as state, ours.use(state):
                assert len(ours.get_all_ranks().split("_")) == numbers
                group = dist.new_group([0, 1])
                setattr(ours, name, group)
                assert ours.get_data_parallel_group() is group
                assert ours.get_data_parallel_world_size() == 2
                assert ours.get_data_parallel_group(with_gtp_remat=False) is (
                    group if name == "_DATA_PARALLEL_GROUP" else state.read("_DATA_PARALLEL_GROUP")
                )
                with version.use(
                    "0.16.1" if numbers == 6 else "0.20"
                ):  # a live state keeps its own
                    assert len(ours.get_all_ranks().split("_")) == numbers
                assert (plain(ours.get_gtp_weight_remat_group(False)) == (0,)) == (numbers == 6)
                assert ours.get_gtp_weight_remat_world_size() == (numbers == 6)


# Ours has every name and argument of the one that is installed; and of the others, where their
# sources are at hand.
def test_nothing_is_lacking():
    assert sources.lacking(THEIR_FOLDER) == {name: [] for name in sources.MODULES}
    for name in sources.MODULES:  # what is read from the source is what is there
        found = sources.names_in(THEIR_FOLDER / f"{name}.py")
        assert {"parallel_state": 60, "process_groups_config": 2, "hyper_comm_grid": 1}[
            name
        ] <= len(found)
    read = sources.names_in(THEIR_FOLDER / "parallel_state.py")
    functions = {name for name, node in read.items() if isinstance(node, ast.FunctionDef)}
    assert functions == {
        name
        for name, value in vars(theirs).items()
        if inspect.isfunction(value) and value.__module__ == theirs.__name__ and name[0] != "_"
    }


# The newest megatron-core that pip finds has nothing that ours lacks; it is not imported.
@pytest.mark.clients
def test_nothing_of_the_newest_is_lacking(tmp_path):
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(tmp_path)]
    command += ["--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64"]
    done = subprocess.run(
        [*command, "--python-version", "3.12", "megatron-core"],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("megatron_core-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    print(wheel.name)
    assert sources.lacking(tmp_path / "megatron" / "core") == {name: [] for name in sources.MODULES}
    assert wheel.name.split("-")[1] >= "0.19.2"


FAKE = {
    "__init__.py": "",
    "package_info.py": "MAJOR = 0\nMINOR = 99\nPATCH = 1\n",
    "user.py": """
        from megatron.core.parallel_state import get_new_group
        from megatron.core.process_groups_config import NewCollection
    """,
    "parallel_state.py": """
        _NEW_GROUP = None
        def get_new_group(check_initialized=True): ...
        def get_context_parallel_group(check_initialized=True, with_new=False): ...
        def _private(): ...
        NEW_CONSTANT = 3
        ALIAS = [get_new_group]
        if True:
            def guarded(): ...
        try:
            import nothing
        except ImportError:
            HAVE_NOTHING = False
    """,
    "process_groups_config.py": """
        class ProcessGroupCollection:
            tp: object
            new_field: object
            def __init__(self, **kwargs): ...
            def new_method(self): ...
        class NewCollection: ...
    """,
    "hyper_comm_grid.py": """
        class HyperCommGrid:
            def __init__(self, shape, dim_names, rank_offset=0, backend=None, twist=None): ...
            def create_pg(self, dims, *, view=None, **kwargs): ...
            def get_pg(self, dims, colour=None): ...
    """,
}


@pytest.fixture(name="folder")
def fake_megatron(tmp_path):
    """A megatron-core of the future, or what is left of it."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    for name, text in FAKE.items():
        (core / name).write_text(textwrap.dedent(text))
    return core


def test_what_is_lacking(folder):
    assert sources.lacking(folder) == {
        "parallel_state": [
            "_NEW_GROUP",
            "get_new_group",
            "get_context_parallel_group(with_new=)",
            "guarded",
        ],
        "process_groups_config": [
            "ProcessGroupCollection.new_field",
            "ProcessGroupCollection.new_method",
            "NewCollection",
        ],
        "hyper_comm_grid": ["HyperCommGrid.__init__(twist=)", "HyperCommGrid.get_pg(colour=)"],
    }


def run(folder, *parts):
    begin = f"import sys, warnings; sys.path.insert(0, {str(folder.parents[1])!r})"
    return fresh_programs.run("\n".join([begin, *map(textwrap.dedent, parts)]))


# A newer megatron-core is followed with one warning that lists what it has more: all of it can be
# imported, and using it is an error.
def test_newer(folder):
    done = run(
        folder,
        """
        from hypercomm.compat.megatron import install, uninstall
        from hypercomm.compat.megatron import version
        assert version.get() == "0.99.1"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            install(); install()
        print([str(warning.message) for warning in caught if "newer" in str(warning.message)])
        from megatron.core.parallel_state import get_new_group, _NEW_GROUP, get_all_ranks
        from megatron.core.process_groups_config import NewCollection
        from megatron.core.parallel_state import NEW_CONSTANT, ALIAS, HAVE_NOTHING
        from megatron.core.parallel_state import _private, guarded
        from megatron.core import parallel_state, user
        assert (_NEW_GROUP, NEW_CONSTANT, ALIAS, HAVE_NOTHING) == (None, 3, None, False)
        class Mine(NewCollection):
            pass
        for use in (get_new_group, NewCollection, Mine, _private, guarded, user.get_new_group):
            try:
                use()
            except AssertionError as error:
                assert "newer than what hypercomm knows" in str(error)
            else:
                raise SystemExit(f"{use} can be used")
        assert not hasattr(parallel_state, "get_something_else")
        uninstall()
        assert not hasattr(parallel_state, "get_new_group")
        import megatron.core.parallel_state as theirs
        assert theirs is not parallel_state
        assert user.get_new_group is theirs.get_new_group  # Megatron's own modules have theirs back
        assert user.NewCollection.__module__ == "megatron.core.process_groups_config"
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("newer than the newest that hypercomm knows, 0.20") == 1
    assert "it has parallel_state._NEW_GROUP, parallel_state.get_new_group" in done.stdout


# A package that cannot be imported is as good as none, and one that comes later is found.
def test_a_broken_package(folder):
    (folder.parent / "__init__.py").write_text("raise RuntimeError('needs a GPU')")
    done = run(
        folder,
        """
        from hypercomm.compat.megatron import install, uninstall
        from hypercomm.compat.megatron import version
        print(version.get())
        install()
        uninstall()
        """,
    )
    assert (done.returncode, done.stdout) == (0, "0.20.0\n"), done.stderr
    done = fresh_programs.run(
        textwrap.dedent(f"""
        import sys, warnings
        from hypercomm.compat.megatron import install
        from hypercomm.compat.megatron import version
        first = version.get()
        sys.path.insert(0, {str(folder.parents[1])!r})
        warnings.simplefilter("ignore")
        (__import__("pathlib").Path({str(folder.parent)!r}) / "__init__.py").unlink()
        install()
        print(first != version.get(), version.get())
        """)
    )
    assert (done.returncode, done.stdout) == (0, "True 0.99.1\n"), done.stderr


# Where a part of megatron-core is missing, or unreadable, ours works all the same.
@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("__init__.py", None, INSTALLED),  # that is no package, so another is found
        ("package_info.py", None, "0.20.0"),
        ("package_info.py", "MAJOR = (", "0.20.0"),
        ("package_info.py", "MAJOR = '0'", "0.20.0"),
        ("package_info.py", "MAJOR = 0\nMINOR = 16", "0.16.0"),
        ("parallel_state.py", None, "0.99.1"),
        ("process_groups_config.py", "def (", "0.99.1"),
    ],
)
def test_half_an_install(folder, file, text, found):
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    done = run(
        folder,
        """
        from hypercomm.compat.megatron import install, uninstall
        from hypercomm.compat.megatron import version
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            install()
        from megatron.core import parallel_state, process_groups_config, hyper_comm_grid
        assert parallel_state.__name__ == "hypercomm.compat.megatron.parallel_state"
        print(version.get())
        uninstall()
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == found
