"""Test NCCL options, failed initialisations and memory buffers."""

import contextlib
import functools
import itertools
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import megatron_comparison as comparison
import pytest
import torch
import torch.distributed as dist
import yaml
from group_checks import tables as registered
from megatron_comparison import ours, theirs
from megatron_oracle import utils as their_utils
from torch._C._distributed_c10d import Backend, FakeProcessGroup

from hypercomm.compat.megatron import version
from hypercomm.errors import ConfigurationError
from hypercomm.testing import fake_world

WORLD_SIZE, RANK = 16, 5
HELPER = "_new_process_group_helper"  # torch creates every group through this function

WITH_PEERS = ("gtp_remat_dp", "gtp_remat_dp_cp", "ep_gtp_remat_dp", "tp_ep_gtp_remat_pp")
"""Keys of groups that exist only with GTP peers."""

# A configuration of 16 ranks with every kind of group: dp=4, cp=2, and expert dp=4 in 2 instances.
ALL_GROUPS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "num_distributed_optimizer_instances": 2,
    "hierarchical_context_parallel_sizes": [2, 1],
    "hybrid_context_parallel": True,
    "create_all_gather_group": True,
    "create_gloo_process_groups": False,
}
SOURCE = Path(theirs.__file__).read_text(encoding="utf-8")
KEYS = tuple(dict.fromkeys(re.findall(r"get_nccl_options\([\"'](\w+)", SOURCE)))
"""The keys with which Megatron's initialize_model_parallel calls get_nccl_options."""


class NcclOptions(FakeProcessGroup.Options):
    """Replaces ProcessGroupNCCL.Options with options that torch's fake backend accepts."""

    def __init__(self, is_high_priority_stream=False):
        super().__init__()
        self.is_high_priority_stream = is_high_priority_stream
        self.config = NcclConfig()


class NcclConfig:
    """Replaces NCCL's config, which has these attributes and no others."""

    __slots__ = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")


def as_value(options):
    """Return the NCCL options that were set, as a value for comparison."""
    if not hasattr(options, "config"):
        return None
    config = options.config
    given = [(name, getattr(config, name)) for name in config.__slots__ if hasattr(config, name)]
    return (options.is_high_priority_stream, tuple(given))


@pytest.fixture
def with_nccl(monkeypatch):
    """Make torch look as if it was built with NCCL."""
    if FakeProcessGroup.Options is Backend.Options:
        pytest.skip("the fake backend of this torch accepts no options")
    stub = SimpleNamespace(Options=NcclOptions)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", stub, raising=False)


@contextlib.contextmanager
def without_nccl():
    """Make torch look as if it was built without NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(dist, "ProcessGroupNCCL", raising=False)
        yield


@contextlib.contextmanager
def created_groups():
    """Record each group of this rank: its description, ranks and options."""
    c10d = dist.distributed_c10d
    groups = []
    real_helper = c10d._new_process_group_helper

    @functools.wraps(real_helper)
    def helper(group_size, group_rank, ranks, *args, **options):
        made = real_helper(group_size, group_rank, ranks, *args, **options)
        if made[0] is not dist.GroupMember.NON_GROUP_MEMBER:
            groups.append(
                SimpleNamespace(
                    group_desc=options["group_desc"],
                    ranks=tuple(sorted(ranks)),
                    options=as_value(options["backend_options"]),
                )
            )
        return made

    with mock.patch.object(c10d, HELPER, helper):
        yield groups


@contextlib.contextmanager
def job(module, rank=RANK):
    """Enter a fake world in which `module` can be initialised. Destroy its state afterwards."""
    with fake_world(WORLD_SIZE, rank), comparison.gloo_made_fake(module):
        try:
            yield
        finally:
            comparison.forget(module)


def groups_of(module, rank=RANK, **arguments):
    """Return the groups that an initialisation creates."""
    with job(module, rank), created_groups() as groups:
        module.initialize_model_parallel(**comparison.taken_by(module, arguments))
    # Newer Megatrons create this group twice, with and without GTP peers. hypercomm creates it
    # once.
    return [group for group in groups if not group.group_desc.endswith("WITH_EGTP")]


def error_of(module, **arguments):
    with job(module):
        try:
            module.initialize_model_parallel(**arguments)
        except Exception as error:  # noqa: BLE001 - whatever Megatron raises
            return error
    return None


# ---- files --------------------------------------------------------------------------------------


@pytest.fixture
def write_file(tmp_path):
    def write(content):
        path = tmp_path / "nccl.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


# A file that is not a YAML mapping of groups to NCCL options is rejected, and runs no code.
@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("dp: {", r"nccl\.yaml"),
        ("dp: !!python/object/apply:os.getcwd []", r"nccl\.yaml"),
        ("[dp]", "dp"),
        ("dp: 3", "'dp'"),
        ("dpp: {max_ctas: 1}", "'dpp'"),
        ("dp: {max_ctas: 1}\ncp: {max_cta: 1}", "'max_cta'"),
    ],
)
@pytest.mark.usefixtures("with_nccl")
def test_files_without_nccl_options(content, named, write_file):
    with job(ours):
        before = registered()
        with pytest.raises((ConfigurationError, yaml.YAMLError), match=named):
            ours.initialize_model_parallel(nccl_communicator_config_path=write_file(content))
        assert registered() == before
        assert not ours.is_initialized()


# If yaml is not installed, the error is a RuntimeError, as in Megatron.
@pytest.mark.usefixtures("with_nccl")
def test_missing_yaml_is_a_runtime_error(write_file, monkeypatch):
    path = write_file("dp: {max_ctas: 8}")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert type(error_of(theirs, nccl_communicator_config_path=path)) is RuntimeError
    found = error_of(ours, nccl_communicator_config_path=path)
    assert isinstance(found, RuntimeError)
    assert "pip install 'hypercomm[nccl-config]'" in str(found)


# As in Megatron, each key of a file sets the options of the groups with this key, and of no other
# groups. All kinds of groups are tested.
@pytest.mark.usefixtures("with_nccl")
def test_each_key_sets_options_of_its_groups(write_file):
    arguments = comparison.taken_by(theirs, ALL_GROUPS)
    lines = [f"{key}: {{max_ctas: {place}}}" for place, key in enumerate(KEYS, 1)]
    path = write_file("\n".join(lines))
    found, expected = (
        Counter(
            (group.ranks, group.options)
            for group in groups_of(module, nccl_communicator_config_path=path, **arguments)
        )
        for module in (ours, theirs)
    )
    assert found == expected
    options = {options for _, options in found}
    has_peers = "gtp_remat" in version.changes()
    unused = WITH_PEERS if has_peers else ()
    assert options == {
        (False, (("max_ctas", place),)) for place, key in enumerate(KEYS, 1) if key not in unused
    }


# A group with high priority in a file or an argument has Megatron's options, on the first and the
# last rank. hypercomm creates equal groups of one rank only once, so larger groups are compared.
@pytest.mark.usefixtures("with_nccl")
@pytest.mark.parametrize("rank", [0, 15])
def test_high_priority_matches_megatron(rank, write_file):
    arguments = {
        "nccl_communicator_config_path": write_file("dp: {max_ctas: 8, net_name: IB}"),
        "high_priority_stream_groups": ["dp", "cp", "cp"],
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
    }
    found, expected = (
        Counter((group.ranks, group.options) for group in groups_of(module, rank, **arguments))
        for module in (ours, theirs)
    )
    assert found.keys() == expected.keys()
    larger = [key for key in expected if len(key[0]) > 1]
    assert [found[key] for key in larger] == [expected[key] for key in larger]


# ---- failures -----------------------------------------------------------------------------------


class OfTheTestError(Exception):
    pass


def fails(*_, **__):
    raise OfTheTestError


@contextlib.contextmanager
def failing_creation(number, error):
    """Make the creation of the n-th group fail."""
    c10d = dist.distributed_c10d
    calls = itertools.count(1)
    real_helper = c10d._new_process_group_helper

    @functools.wraps(real_helper)
    def helper(*args, **options):
        if next(calls) == number:
            raise error
        return real_helper(*args, **options)

    with mock.patch.object(c10d, HELPER, helper):
        yield


# If a function of the caller raises, an option is invalid, or the creation of any group fails or is
# interrupted, nothing has changed, and the next initialisation succeeds.
@pytest.mark.parametrize(
    ("error", "arguments", "fault"),
    [
        (OfTheTestError, {"get_embedding_ranks": fails}, contextlib.nullcontext()),
        (OfTheTestError, {"get_position_embedding_ranks": fails}, contextlib.nullcontext()),
        (ConfigurationError, {"high_priority_stream_groups": ["ep"]}, without_nccl()),
        (OfTheTestError, ALL_GROUPS, failing_creation(1, OfTheTestError())),
        (KeyboardInterrupt, ALL_GROUPS, failing_creation(9, KeyboardInterrupt())),
    ],
    ids=["embedding", "position embedding", "options", "first", "interrupted"],
)
def test_recovers_from_an_error(error, arguments, fault):
    with job(ours):
        before = registered()
        with pytest.raises(error), fault:
            ours.initialize_model_parallel(**arguments)
        assert registered() == before
        assert all(not getattr(ours, name) for name in comparison.GLOBALS)
        ours.initialize_model_parallel(**ALL_GROUPS)
        assert ours.get_context_parallel_world_size() == 2


# ---- memory buffers -----------------------------------------------------------------------------


# A state has a memory buffer from initialisation to destruction. Setting a second buffer raises, as
# in Megatron. The symmetric buffer is only created on request, as an object of Megatron's class
# that uses the tensor parallel group.
@pytest.mark.parametrize("kind", ["memory", "symmetric_memory"])
def test_global_memory_buffers(kind, monkeypatch):
    theirs_kind = mock.Mock(side_effect=lambda *_: object())
    monkeypatch.setattr(their_utils, "GlobalSymmetricMemoryBuffer", theirs_kind, raising=False)
    get, fill, destroy = (
        getattr(ours, f"{what}_global_{kind}_buffer") for what in ("get", "_set", "destroy")
    )
    with job(ours):
        with pytest.raises(AssertionError, match="initialize"):
            get()
        ours.initialize_model_parallel()
        if kind == "memory":
            assert isinstance(get(), ours.GlobalMemoryBuffer)
        else:
            fill()
            theirs_kind.assert_called_once_with(256, ours.get_tensor_model_parallel_group())
        buffer = get()
        assert get() is buffer
        with pytest.raises(AssertionError, match="already"):
            fill()
        destroy()
        with pytest.raises(AssertionError, match="initialize"):
            get()
        fill()
        assert get() is not buffer


# A buffer grows if a larger tensor is requested. A smaller tensor shares its memory.
def test_buffers_grow():
    buffer = ours.GlobalMemoryBuffer()
    _, larger, smaller = (buffer.get_tensor((size,), torch.float32, "x") for size in (2, 6, 4))
    assert (larger.shape, smaller.shape) == ((6,), (4,))
    assert smaller.data_ptr() == larger.data_ptr()
