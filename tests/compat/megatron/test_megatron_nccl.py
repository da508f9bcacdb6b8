"""Test NCCL options, SHARP, UCC, the environment, failed initialisations and memory buffers."""

import contextlib
import functools
import itertools
import os
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
COLLNET = "NCCL_COLLNET_ENABLE"
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


@pytest.fixture(autouse=True)
def _environment():
    """Restore the environment after each test."""
    with mock.patch.dict(os.environ):
        os.environ.pop(COLLNET, None)
        yield


@contextlib.contextmanager
def created_groups():
    """Record each group of this rank: its description, ranks, options and environment."""
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
                    environment=dict(os.environ),
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


# All options of a file are passed to NCCL as Megatron passes them. A group without options gets
# none. hypercomm creates equal groups of one rank only once, so only larger groups are compared.
@pytest.mark.usefixtures("with_nccl")
@pytest.mark.parametrize("rank", [0, 15])
@pytest.mark.parametrize(
    ("content", "high_priority"),
    [
        ("dp: {max_ctas: 8, min_ctas: 2, cga_cluster_size: 4, net_name: IB}", []),
        ("dp: {is_high_priority_stream: false, max_ctas: 8}", ["dp", "cp", "cp"]),
        (None, list(KEYS)),
    ],
)
def test_nccl_options_match_megatron(content, high_priority, rank, write_file):
    arguments = {
        "nccl_communicator_config_path": content and write_file(content),
        "high_priority_stream_groups": high_priority,
        "pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 2,
    }
    before = list(high_priority)
    found, expected = (
        Counter((group.ranks, group.options) for group in groups_of(module, rank, **arguments))
        for module in (ours, theirs)
    )
    assert found.keys() == expected.keys()
    larger = [key for key in expected if len(key[0]) > 1]
    assert [found[key] for key in larger] == [expected[key] for key in larger]
    assert high_priority == before


# ---- SHARP --------------------------------------------------------------------------------------

REPLICAS = {"use_sharp": True, "sharp_enabled_group": "dp_replica"}
INSTANCES = {"num_distributed_optimizer_instances": 2}
SHARP = [
    ({"use_sharp": True}, lambda rank: range(rank % 2, 16, 2)),
    ({"use_sharp": True, "sharp_enabled_group": "dp"}, lambda rank: range(rank % 2, 16, 2)),
    (REPLICAS, lambda rank: (rank % 8, rank % 8 + 8)),
    ({}, None),
]
"""dp has 8 ranks in steps of 2. A replica group has one rank of each half, at the same position."""


# Megatron 0.19 and 0.20 fail with use_sharp: they read a group that they have not set yet.
WITH_SHARP = [ours] if "gtp_remat" in version.changes() else [ours, theirs]


def sharp_of(module, rank, arguments, sizes):
    """Return the groups, and the ranks, device and environment of each barrier."""
    barriers = []

    def barrier(group=None, device_ids=None):
        ranks = tuple(dist.get_process_group_ranks(group))
        barriers.append((ranks, device_ids, os.environ.get(COLLNET)))

    with (
        mock.patch.object(dist, "barrier", barrier),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=3),
        mock.patch.object(torch.cuda, "synchronize") as synchronize,
    ):
        groups = groups_of(module, rank, **sizes, **arguments)
    assert synchronize.call_count == len(barriers)
    return groups, barriers


# One barrier, over the same group as in Megatron, runs with SHARP enabled. SHARP is disabled
# afterwards.
@pytest.mark.parametrize("preset", [None, "0", "1"])
@pytest.mark.parametrize("rank", [0, 5, 15])
@pytest.mark.parametrize(("arguments", "ranks"), SHARP)
def test_sharp_barrier_matches_megatron(arguments, ranks, rank, preset):
    sizes = {**INSTANCES, "tensor_model_parallel_size": 2}
    found = []
    for module in WITH_SHARP:
        if preset is not None:
            os.environ[COLLNET] = preset
        found.append(sharp_of(module, rank, arguments, sizes)[1])
        assert COLLNET not in os.environ
    # Megatron repeats the barrier for each group of other ranks that it creates.
    assert len(found[0]) <= 1
    assert all(barrier == found[0][0] for barrier in found[-1])
    assert bool(found[0]) == bool(found[-1])
    assert found[0] == ([(tuple(ranks(rank)), [3], "1")] if ranks else [])


# SHARP arguments that Megatron rejects raise here, too, and do not change the environment.
@pytest.mark.parametrize(
    "arguments",
    [
        {"sharp_enabled_group": "dp"},
        {"sharp_enabled_group": "tp", "use_sharp": True},
        REPLICAS,
        {"sharp_enabled_group": "dp_replica", **INSTANCES},
    ],
)
def test_invalid_sharp_arguments(arguments):
    assert type(error_of(theirs, **arguments)) is AssertionError
    os.environ[COLLNET] = "1"
    before = dict(os.environ)
    error = error_of(ours, **arguments)
    assert isinstance(error, AssertionError)
    assert "sharp_enabled_group" in str(error)
    assert dict(os.environ) == before


# ---- UCC ----------------------------------------------------------------------------------------

UCC = {"pipeline_model_parallel_comm_backend": "ucc", "pipeline_model_parallel_size": 2}
UCC_NAMES = (
    "TORCH_UCC_BLOCKING_WAIT",
    "UCC_EC_CUDA_STREAM_TASK_MODE",
    "UCX_TLS",
    "NSYS_UCP_COMM_PARAMS",
    "UCX_RNDV_THRESH",
    "UCX_NET_DEVICES",
    "UCC_CL_BASIC_TLS",
)


@pytest.fixture
def with_ucc(monkeypatch):
    """Make torch look as if it was built with every backend. A fake world uses none of them."""
    monkeypatch.setattr(dist, "is_backend_available", lambda _: True)
    for name in UCC_NAMES:
        monkeypatch.delenv(name, raising=False)


def environments(arguments, preset):
    """Yield for each module the environment while the pipeline group is created, and afterwards."""
    for module in (ours, theirs):
        with mock.patch.dict(os.environ, preset):
            groups = groups_of(module, **arguments)
            pipeline = next(g for g in groups if g.group_desc == "PIPELINE_MODEL_PARALLEL_GROUP")
            yield pipeline.environment, dict(os.environ)


# The variables for UCC are set as in Megatron: some only if they are unset, some always. They stay
# set.
@pytest.mark.usefixtures("with_ucc")
@pytest.mark.parametrize(
    "preset",
    [
        {},
        {"TORCH_UCC_BLOCKING_WAIT": "all", "UCX_TLS": "tcp", "UCC_EC_CUDA_STREAM_TASK_MODE": ""},
        dict.fromkeys(UCC_NAMES, "mine"),
    ],
)
def test_ucc_environment_matches_megatron(preset):
    found, expected = environments(UCC, preset)
    assert found == expected
    assert found[0]["UCX_RNDV_THRESH"] == "0"
    assert found[1]["UCX_TLS"] == preset.get("UCX_TLS", "ib,cuda_copy")


# UCC with only one hardware queue is rejected, as in Megatron, and nothing changes.
@pytest.mark.usefixtures("with_ucc")
def test_ucc_with_one_queue_raises():
    with mock.patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1"):
        before = dict(os.environ)
        assert isinstance(error_of(theirs, **UCC), AssertionError)
        os.environ.clear()
        os.environ.update(before)
        assert isinstance(error_of(ours, **UCC), AssertionError)
        assert dict(os.environ) == before


# ---- failures -----------------------------------------------------------------------------------


class OfTheTestError(Exception):
    pass


def fails(*_, **__):
    raise OfTheTestError


def failing_barrier():
    return mock.patch.object(dist, "barrier", fails)


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


def assert_recovers(error, arguments, fault):
    """Assert that a failed initialisation changes nothing, and that the next one succeeds."""
    os.environ[COLLNET] = "0"
    with job(ours):
        before = registered()
        environment = dict(os.environ)
        with pytest.raises(error), fault:
            ours.initialize_model_parallel(**arguments)
        assert registered() == before
        assert dict(os.environ) == environment
        assert all(not getattr(ours, name) for name in comparison.GLOBALS)
        assert not ours.is_initialized()
        assert ours.get_context_parallel_group(check_initialized=False) is None
        ours.initialize_model_parallel(**ALL_GROUPS)
        found = {**comparison.ask(ours), **comparison.read_globals(ours)}
    with job(theirs):
        theirs.initialize_model_parallel(**comparison.taken_by(theirs, ALL_GROUPS))
        assert found == {**comparison.ask(theirs), **comparison.read_globals(theirs)}


# Initialisation recovers if a caller's function raises, an option is invalid, or a barrier fails.
@pytest.mark.usefixtures("with_ucc")
@pytest.mark.parametrize(
    ("error", "arguments", "fault"),
    [
        (OfTheTestError, {"get_embedding_ranks": fails}, contextlib.nullcontext),
        (OfTheTestError, {"get_position_embedding_ranks": fails}, contextlib.nullcontext),
        (OfTheTestError, {**UCC, "get_embedding_ranks": fails}, contextlib.nullcontext),
        (ConfigurationError, {"high_priority_stream_groups": ["ep"]}, without_nccl),
        (OfTheTestError, {"use_sharp": True}, failing_barrier),
        (OfTheTestError, {**REPLICAS, **INSTANCES}, failing_barrier),
    ],
    ids=["embedding", "position embedding", "ucc", "options", "sharp dp", "sharp dp_replica"],
)
def test_recovers_from_an_error(error, arguments, fault):
    assert_recovers(error, arguments, fault())


# Initialisation recovers if the creation of any group fails or is interrupted.
@pytest.mark.parametrize("error", [OfTheTestError(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("number", [1, 9, sum("gtp" not in key for key in KEYS)])
def test_recovers_from_a_failed_creation(number, error):
    assert_recovers(type(error), ALL_GROUPS, failing_creation(number, error))


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
