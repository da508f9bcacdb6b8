"""Test which release of megatron-core is followed, and newer or broken installations."""

import forked_programs
import pytest
import torch.distributed as dist
from megatron_comparison import following, ours, plain, theirs
from megatron_oracle import core as their_core, hyper_comm_grid, process_groups_config

from hypercomm import megatron_grids
from hypercomm.compat.megatron import (
    ParallelState,
    hyper_comm_grid as our_grid,
    process_groups_config as our_config,
    version,
)
from hypercomm.errors import ConfigurationError
from hypercomm.testing import fake_world

INSTALLED = ".".join(their_core.__version__.split(".")[:2])


# hypercomm follows the installed version until another version is set.
def test_followed_version():
    assert version.get() == INSTALLED
    for text in ("0.17", "0.17.0rc0", "0.17.0.dev3", "0.17.1+local"):
        with following(text):
            assert version.get() == "0.17"
            assert version.current() == (0, 17)
    assert version.get() == INSTALLED


@pytest.mark.parametrize("wrong", ["", "0.x", "1.2.3.4", "0.21", "0.15.3"])
def test_unknown_versions_raise(wrong):
    with pytest.raises(ConfigurationError):
        version.set(wrong)
    assert version.get() == INSTALLED


# Releases differ in the default data parallel group and in the number of values in get_all_ranks().
def test_differences_between_releases():
    with fake_world(8):
        for release, numbers, name in [
            ("0.16.1", 5, "_DATA_PARALLEL_GROUP"),
            ("0.18.2", 5, "_DATA_PARALLEL_GROUP"),
            ("0.19.0", 6, "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"),
        ]:
            with following(release), ParallelState.create() as state, ours.use(state):
                assert len(ours.get_all_ranks().split("_")) == numbers
                group = dist.new_group([0, 1])
                setattr(ours, name, group)
                assert ours.get_data_parallel_group() is group
                assert ours.get_data_parallel_world_size() == 2
                assert ours.get_data_parallel_group(with_gtp_remat=False) is (
                    group if name == "_DATA_PARALLEL_GROUP" else state.read("_DATA_PARALLEL_GROUP")
                )
                assert (plain(ours.get_gtp_weight_remat_group(False)) == (0,)) == (numbers == 6)
                assert ours.get_gtp_weight_remat_world_size() == (numbers == 6)


# Since Megatron-LM pull request 6868, context parallel ranks are closer than GTP peers. The
# expected groups are computed from strides: tp is innermost, then cp and gtp_remat in the order of
# the release.
@pytest.mark.parametrize(
    ("release", "cp", "gtp"),
    [("0.19.2", [0, 4], [0, 2]), ("0.20.0", [0, 2], [0, 4])],
)
def test_order_of_cp_and_gtp_remat(release, cp, gtp):
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "gtp_remat_size": 2}
    with following(release), fake_world(16), ParallelState.create(**sizes) as state:
        assert state.values["_CONTEXT_PARALLEL_GLOBAL_RANKS"] == cp
        assert state.values["_GTP_WEIGHT_REMAT_GLOBAL_RANKS"] == gtp
        assert state.values["_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"] == [0, 1]
    with following(release):
        layout = megatron_grids(tp=2, cp=2, gtp_remat=2, world_size=16)["training"].layout
    assert [list(layout.groups(dim).of(0)) for dim in ("cp", "gtp_remat")] == [cp, gtp]
    named = sizes | {"order": "tp-gtp_remat-cp-ep-dp-pp"}  # an explicit order is kept
    with following(release), fake_world(16), ParallelState.create(**named) as state:
        assert state.values["_GTP_WEIGHT_REMAT_GLOBAL_RANKS"] == [0, 2]


# hypercomm has every public name of the installed megatron-core.
@pytest.mark.parametrize(
    ("module", "own"),
    [(theirs, ours), (process_groups_config, our_config), (hyper_comm_grid, our_grid)],
)
def test_no_name_is_missing(module, own):
    defined = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]
    assert defined
    assert [name for name in defined if not hasattr(own, name)] == []


FAKE = {
    "__init__.py": "",
    "package_info.py": "MAJOR = 0\nMINOR = 99\nPATCH = 1\n",
    "parallel_state.py": "",
}


@pytest.fixture(name="folder")
def fake_megatron(tmp_path):
    """Write a megatron-core of a future release."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    for name, text in FAKE.items():
        (core / name).write_text(text)
    return core


INSTALL = """
from hypercomm.compat.megatron import install, version
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    install(); install()
print([str(warning.message) for warning in caught if "newer" in str(warning.message)])
print(version.get())
from megatron.core import parallel_state, process_groups_config, hyper_comm_grid
assert parallel_state.__name__ == "hypercomm.compat.megatron.parallel_state"
"""


def run(folder):
    begin = f"import sys, warnings; sys.path.insert(0, {str(folder.parents[1])!r})"
    done = forked_programs.run(f"{begin}\n{INSTALL}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# A newer megatron-core gives one warning.
def test_newer_megatron_warns(folder):
    warned, release = run(folder)
    assert release == "0.99"
    assert warned.count("0.99 is newer than 0.20, the newest release") == 1


# A package that cannot be imported is treated as missing.
def test_broken_package_is_treated_as_missing(folder):
    (folder.parent / "__init__.py").write_text("raise RuntimeError('needs a GPU')")
    begin = f"import sys; sys.path.insert(0, {str(folder.parents[1])!r})"
    program = (
        "from hypercomm.compat.megatron import install, version\nprint(version.get())\ninstall()"
    )
    done = forked_programs.run(f"{begin}\n{program}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0.20\n", done.stderr


# If a part of megatron-core is missing or cannot be parsed, hypercomm still works.
@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("__init__.py", None, INSTALLED),  # no longer a package, so INSTALLED is found
        ("package_info.py", None, "0.20"),
        ("package_info.py", "MAJOR = 0\nMINOR = 16", "0.16"),
    ],
)
def test_incomplete_megatron(folder, file, text, found):
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    assert run(folder)[-1] == found
