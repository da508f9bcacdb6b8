"""Test process group collections against Megatron's: fields, states, grids, optimizer, DDP."""

import contextlib
import dataclasses
import itertools
from types import SimpleNamespace

import megatron_comparison as comparison
import pytest
import torch.distributed as dist
from megatron_comparison import ours, theirs
from megatron_oracle import process_groups_config as their_config

from hypercomm import HyperCommGrid
from hypercomm.compat.megatron import ParallelState, version
from hypercomm.compat.megatron import process_groups_config as our_config
from hypercomm.compat.megatron.process_groups_config import (
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
)
from hypercomm.errors import UnknownFieldError
from hypercomm.testing import fake_world

# The fields of the installed Megatron. EVERY lists the fields of all releases, in the order of the
# newest release.
FIELDS = tuple(field.name for field in dataclasses.fields(their_config.ProcessGroupCollection))
TWINS = ("dp_cp_ag", "expt_dp_ag")
FIELDS = tuple(name for name in FIELDS if name not in TWINS)
EVERY = (
    "tp",
    "pp",
    "mp",
    "embd",
    "pos_embd",
    "cp",
    "tp_cp",
    "hcp",
    "ep",
    "expt_tp",
    "tp_ep",
    "tp_ep_pp",
    "tp_ep_pp_with_egtp_remat",
    "tp_dp_cp",
    "dp",
    "dp_cp",
    "dp_cp_gtp_remat",
    "dp_cp_ag",
    "gtp_remat",
    "expt_gtp_remat",
    "expt_dp",
    "expt_dp_gtp_remat",
    "expt_dp_ag",
    "intra_dp_cp",
    "intra_expt_dp",
    "inter_dist_opt",
    "intra_dist_opt",
)
HIDES_NONE = "unset_is_none" in version.changes()
UNKNOWN = ("dpcp", "dp-cp", "TP", "virtual_pipeline_model_parallel_size", "_tp", "size")

WORLD_SIZE = 16
INSTANCES = {"num_distributed_optimizer_instances": 2}
SIZES = {
    "dense": {},
    "tp": {"tp": 2},
    "tp_pp_cp": {"tp": 2, "pp": 2, "cp": 2},
    "instances": {"tp": 2, **INSTANCES},
    "experts": {"tp": 2, "ep": 4, "expt_tp": 1, "pp": 2, **INSTANCES},
    "hcp": {"cp": 4, "hierarchical_context_parallel_sizes": [2, 2]},
    "pp": {"pp": 4, "create_gloo_process_groups": False},
}
MATRIX = {
    label: {comparison.LONG.get(name, name): size for name, size in sizes.items()}
    for label, sizes in SIZES.items()
}
RANKS = (0, 5, 15)


@contextlib.contextmanager
def state_of(module, rank, arguments):
    """Initialise `module` as one rank of 16."""
    with fake_world(WORLD_SIZE, rank), comparison.gloo_made_fake(module):
        try:
            module.initialize_model_parallel(**arguments)
            yield
        finally:
            comparison.forget(module)


def class_of(module):
    config = our_config if module is ours else their_config
    return config.ProcessGroupCollection


def ranks_of_fields(collection, names=FIELDS):
    """Return the ranks of each group of a collection."""
    return {name: comparison.plain(getattr(collection, name, None)) for name in names}


# ---- fields -------------------------------------------------------------------------------------


# The collection has the fields of all releases of Megatron, in Megatron's order.
def test_fields_match_megatron():
    names = [field.name for field in dataclasses.fields(ProcessGroupCollection)]
    assert names == list(EVERY)
    assert [name for name in names if name in FIELDS] == list(FIELDS)


# A field that was not set is None, whether other fields were set or not. In Megatron 0.16, reading
# it raises AttributeError, so hasattr() is false.
@pytest.mark.parametrize("name", EVERY)
def test_unset_fields(name):
    other = "tp" if name != "tp" else "pp"
    collections = ProcessGroupCollection(), ProcessGroupCollection(**{other: object()})
    for release in ("0.17.0", "0.20"):
        with comparison.following(release):
            assert all(getattr(collection, name) is None for collection in collections)
    with comparison.following("0.16.1"):
        assert not any(hasattr(collection, name) for collection in collections)
        with pytest.raises(ValueError, match=f"field '{name}' was not set.*0.16.1.*'{other}'"):
            getattr(collections[1], name)


# An unknown name raises at construction, on reading, and in a request to a state. The error quotes
# the name and lists the fields.
@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize(
    "use",
    [
        lambda name: ProcessGroupCollection(**{name: None}),
        lambda name: ProcessGroupCollection(tp=None, **{name: None}),
        lambda name: getattr(ProcessGroupCollection(), name),
        lambda name: ProcessGroupCollection.use_mpu_process_groups([name]),
        lambda name: ProcessGroupCollection.use_mpu_process_groups(["tp", name]),
        lambda name: ProcessGroupCollection.from_state(ParallelState(), [name]),
    ],
    ids=["init", "init with others", "read", "mpu", "mpu with others", "state"],
)
def test_unknown_names_raise(use, name):
    with pytest.raises(UnknownFieldError, match=rf"'{name}'.*'tp'.*'intra_dist_opt'"):
        use(name)


# repr() shows the fields that were set, with the sizes of their groups, in the order of the fields.
@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "ProcessGroupCollection(empty)"),
        (["tp"], "ProcessGroupCollection(tp(2))"),
        (["dp", "tp"], "ProcessGroupCollection(tp(2), dp(8))"),
        (["embd"], "ProcessGroupCollection(empty)"),
        (["hcp"], "ProcessGroupCollection(hcp([2, 8]))"),
    ],
)
def test_repr_of_a_collection(names, text):
    with fake_world(WORLD_SIZE), HyperCommGrid([2, 8], ["tp", "dp"]) as grid:
        tp, dp = grid.create_pg("tp"), grid.create_pg("dp")
        groups = {"tp": tp, "dp": dp, "embd": None, "hcp": [tp, dp]}
        collection = ProcessGroupCollection(**{name: groups[name] for name in names})
        assert repr(collection) == text
        # Megatron's repr() fails for a list, and in 0.16 it shows fields that were set to None.
        if "hcp" not in names and (HIDES_NONE or "embd" not in names):
            chosen = {name: groups[name] for name in names}
            assert repr(their_config.ProcessGroupCollection(**chosen)) == text


# ---- collections of a state ---------------------------------------------------------------------


def mpu_groups(module, rank, arguments, required=None):
    with state_of(module, rank, arguments):
        collection = class_of(module).use_mpu_process_groups(required)
        return ranks_of_fields(collection, FIELDS if required is None else required)


# Every field is a group of the same ranks as Megatron's field, or is None if Megatron's field is.
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("arguments", MATRIX.values(), ids=MATRIX)
def test_use_mpu_process_groups_matches_megatron(arguments, rank):
    assert mpu_groups(ours, rank, arguments) == mpu_groups(theirs, rank, arguments)


# The collection of a separate state has groups of the same ranks, with or without
# share="identical". The default state stays empty.
@pytest.mark.parametrize("way", [{}, {"share": "identical"}], ids=str)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("arguments", MATRIX.values(), ids=MATRIX)
def test_collection_of_a_state(arguments, rank, way):
    expected = mpu_groups(theirs, rank, arguments)
    with fake_world(WORLD_SIZE, rank), ParallelState.create(**arguments, **way) as state:
        first, second = (
            ProcessGroupCollection.from_state(state),
            ProcessGroupCollection.from_state(state),
        )
        assert ranks_of_fields(first) == expected
        assert not ours.is_initialized()
        with ours.use(state):
            mpu = ProcessGroupCollection.use_mpu_process_groups()
        for name in (*FIELDS, *TWINS):
            groups = [getattr(held, name, None) for held in (first, second, mpu)]
            assert groups[0] == groups[1] == groups[2]


# ---- collections of grids -----------------------------------------------------------------------

DENSE = {
    "tp": "tp",
    "cp": "cp",
    "dp": "dp",
    "pp": "pp",
    "mp": "tp-pp",
    "tp_cp": "tp-cp",
    "dp_cp": "dp-cp",
    "tp_dp_cp": "tp-dp-cp",
    "intra_dp_cp": "dp-cp",
}
EXPERT = {
    "ep": "ep",
    "expt_tp": "tp",
    "tp_ep": "tp-ep",
    "tp_ep_pp": "tp-ep-pp",
    "expt_dp": "dp",
    "intra_expt_dp": "dp",
}


def grids():
    """Return a dense and an expert grid of 16 ranks, as MATRIX["experts"] with one instance."""
    dense = HyperCommGrid([2, 1, 4, 2], ["tp", "cp", "dp", "pp"])
    return dense, HyperCommGrid([1, 4, 2, 2], ["tp", "ep", "dp", "pp"])


def create_all(dense, expert):
    for grid, fields in ((dense, DENSE), (expert, EXPERT)):
        for dims in fields.values():
            grid.ensure_pg(dims.split("-"))
    ends = {"embd": lambda ranks: (ranks[0], ranks[-1]), "pos_embd": lambda ranks: (ranks[0],)}
    for name, pick in ends.items():
        dense.create_pg("pp", name=name, derive=lambda groups, pick=pick: groups.pick(pick))


# A collection made from two grids has the ranks that Megatron computes for the same sizes.
@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_from_grid_matches_megatron(rank):
    sizes = MATRIX["experts"] | {"num_distributed_optimizer_instances": 1}
    expected = mpu_groups(theirs, rank, sizes)
    with fake_world(WORLD_SIZE, rank):
        dense, expert = grids()
        with dense, expert:
            create_all(dense, expert)
            collection = ProcessGroupCollection.from_grid(dense, expert)
            names = [*DENSE, *EXPERT, "embd", "pos_embd"]
            assert ranks_of_fields(collection, names) == {key: expected[key] for key in names}
            absent = {"hcp", "inter_dist_opt", "intra_dist_opt"}
            absent |= {"gtp_remat", "expt_gtp_remat"} & set(FIELDS)
            if rank >= 8:
                absent.add("pos_embd")
            assert {name for name in FIELDS if getattr(collection, name, None) is None} == absent


# from_grid() with the grids of a state returns the same collection as the state.
@pytest.mark.parametrize("arguments", MATRIX.values(), ids=MATRIX)
def test_from_grid_with_the_grids_of_a_state(arguments):
    with fake_world(WORLD_SIZE, 5), ParallelState.create(**arguments) as state:
        collection = ProcessGroupCollection.from_grid(state.grids["dense"], state.grids["expert"])
        names = [name for name in FIELDS if name != "hcp"]
        assert ranks_of_fields(collection, names) == ranks_of_fields(
            ProcessGroupCollection.from_state(state), names
        )


# A group is used for exactly the fields that stand for its dims. Fields for experts use only groups
# of the expert grid.
@pytest.mark.parametrize(
    ("dense_dims", "expert_dims", "filled"),
    [
        ([], [], ""),
        (["tp"], [], "tp(2)"),
        (["dp"], [], "dp(4)"),
        ([], ["dp"], "expt_dp(2), intra_expt_dp(2)"),
        ([], ["tp"], "expt_tp(1)"),
        (["tp-pp"], ["tp-ep"], "mp(4), tp_ep(4)"),
        (["dp-cp"], [], "dp_cp(4), intra_dp_cp(4)"),
        (["tp-cp-dp-pp"], ["ep-pp"], ""),
    ],
)
def test_from_grid_uses_existing_groups(dense_dims, expert_dims, filled):
    with fake_world(WORLD_SIZE):
        dense, expert = grids()
        with dense, expert:
            for grid, names in ((dense, dense_dims), (expert, expert_dims)):
                for dims in names:
                    grid.create_pg(dims.split("-"))
            collection = ProcessGroupCollection.from_grid(dense, expert)
            without = {name: vars(collection).pop(name, None) for name in EVERY if "gtp" in name}
            assert repr(collection) == f"ProcessGroupCollection({filled or 'empty'})"
            whole = {"dp_cp": "dp_cp_gtp_remat", "expt_dp": "expt_dp_gtp_remat"}
            for name, with_gtp in whole.items() if "gtp_remat" in version.changes() else ():
                assert without[with_gtp] is getattr(collection, name, None)


# A field over dims uses the group over these dims that has no name. A field of derived groups uses
# the group with the name of the field, and so does a field over dims that the grid does not have.
def test_from_grid_uses_named_groups():
    with fake_world(WORLD_SIZE), HyperCommGrid([2, 8], ["tp", "dp"]) as grid:
        plain = grid.create_pg("dp")
        grid.create_pg("dp", name="dp_cp")
        grid.create_pg("tp", name="gloo")
        grid.create_pg("dp", name="tp")
        alone = grid.create_pg("tp", name="cp", derive=lambda groups: groups.chunks(1))
        embd, pos = (grid.create_pg("tp", name=name) for name in ("embd", "pos_embd"))
        collection = ProcessGroupCollection.from_grid(grid)
        assert collection.dp is plain
        assert collection.dp_cp is plain
        assert collection.cp is alone
        assert collection.embd is embd
        assert collection.pos_embd is pos
        assert getattr(collection, "tp", None) is None


# ---- setup for an optimizer and for DDP ---------------------------------------------------------

DATA = ("dp", "dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp", "inter_dist_opt")
NEEDED = {
    "optimizer": (*DATA, "intra_dist_opt", "mp", "tp_ep_pp"),
    "ddp": (*DATA, "tp", "pp", "ep"),
}


def model_of(cp_size, ddp_config):
    config = (
        SimpleNamespace() if cp_size is None else SimpleNamespace(context_parallel_size=cp_size)
    )
    model = SimpleNamespace(module=SimpleNamespace(module=SimpleNamespace(config=config)))
    if ddp_config is not None:
        model.ddp_config = ddp_config
    return model


def set_up(module, what, collection, cp_size, ddp_config, gloo=False):
    """Return the ranks of the groups by key, or the error."""
    kind = class_of(module)
    collection = None if collection is None else kind(**collection)
    model = model_of(cp_size, ddp_config)
    try:
        if what == "optimizer":
            found = kind.setup_process_groups_for_optimizer(collection, [model], gloo)
        else:
            config = model.module.module.config
            found = kind.setup_process_groups_for_ddp(collection, config, ddp_config)
    except Exception as error:  # noqa: BLE001 - whatever Megatron raises
        return error
    return {key: comparison.plain(group) for key, group in found.items()}


def assert_same(found, expected):
    """Assert equal keys and groups, or an error that code for Megatron's error catches."""
    if isinstance(expected, Exception):
        assert isinstance(found, type(expected)), f"{expected!r} was {found!r}"
    else:
        newer = {key for key in found if "gtp_remat" in key} - expected.keys()
        assert {key: group for key, group in found.items() if key not in newer} == expected


def ddp_configs():
    for instances, sharded in itertools.product([1, 2], [False, True]):
        yield SimpleNamespace(
            num_distributed_optimizer_instances=instances, use_distributed_optimizer=sharded
        )


# The setup from a state matches Megatron's, with one or two optimizer instances, with and without
# gloo groups.
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("what", NEEDED)
@pytest.mark.parametrize("arguments", MATRIX.values(), ids=MATRIX)
def test_setup_from_a_state_matches_megatron(arguments, what, rank):
    found = {}
    for module in (ours, theirs):
        with state_of(module, rank, arguments):
            found[module] = [
                set_up(module, what, None, 1, config, gloo)
                for config in (*ddp_configs(), *([None] if what == "optimizer" else []))
                for gloo in (False, True)
            ]
    for ours_, theirs_ in zip(found[ours], found[theirs], strict=True):
        assert_same(ours_, theirs_)


@pytest.fixture
def some_groups():
    """Create a different group for each field, so that a mix-up is found."""
    with fake_world(WORLD_SIZE):
        pairs = {name: dist.new_group([0, 1 + at]) for at, name in enumerate(FIELDS[:15])}
        triples = {name: dist.new_group([0, at, 15]) for at, name in enumerate(FIELDS[15:], 1)}
        yield pairs | triples


# For a collection that lacks one, two, all but one or all fields, in any combination, the groups or
# errors match Megatron's. An empty collection is different from None, which selects the state.
@pytest.mark.parametrize("gloo", [False, True])
@pytest.mark.parametrize("cp_size", [None, 1, 2])
@pytest.mark.parametrize("what", NEEDED)
def test_setup_from_a_collection_matches_megatron(what, cp_size, gloo, some_groups):
    fields = NEEDED[what]
    lacking = [*itertools.chain.from_iterable(itertools.combinations(fields, n) for n in (0, 1, 2))]
    lacking += [tuple(name for name in fields if name != only) for only in (*fields, None)]
    rejected = accepted = 0
    for lacks, config in itertools.product(
        lacking, [*ddp_configs(), *([None] if what == "optimizer" else [])]
    ):
        given = {name: some_groups[name] for name in fields if name not in lacks}
        found, expected = (
            set_up(module, what, given, cp_size, config, gloo) for module in (ours, theirs)
        )
        assert_same(found, expected)
        rejected += isinstance(expected, Exception)
        accepted += isinstance(expected, dict)
    assert rejected > 0
    assert accepted > 0 or (what, gloo) == ("optimizer", True)


# If a model lacks a configuration that is needed, Megatron's error is raised. If `config` is None,
# the configuration of the inner module is used.
@pytest.mark.parametrize(
    "model",
    [
        SimpleNamespace(),
        SimpleNamespace(module=SimpleNamespace()),
        SimpleNamespace(config=None),
        SimpleNamespace(
            config=None,
            module=SimpleNamespace(config=SimpleNamespace(context_parallel_size=1)),
        ),
        [SimpleNamespace(config=SimpleNamespace(context_parallel_size=1))],
    ],
    ids=["none", "none inside", "of None", "inside", "list"],
)
def test_setup_finds_the_configuration(model, some_groups):
    results = []
    for module in (ours, theirs):
        given = class_of(module)(
            **{name: some_groups[name] for name in ("dp", "expt_dp", "mp", "tp_ep_pp")}
        )
        try:
            found = given.setup_process_groups_for_optimizer(given, [model], False)
            results.append({key: comparison.plain(group) for key, group in found.items()})
        except Exception as error:  # noqa: BLE001 - whatever Megatron raises
            results.append(error)
    assert_same(*results)


# If DDP has no expert group, a group that contains only the calling rank is created.
@pytest.mark.parametrize("given", [{}, {"expt_dp": None}])
def test_setup_for_ddp_creates_an_expert_group(given):
    with fake_world(WORLD_SIZE, 5):
        groups = dict.fromkeys(("dp", "tp", "pp", "ep"), dist.group.WORLD) | given
        config = SimpleNamespace(
            num_distributed_optimizer_instances=1, use_distributed_optimizer=False
        )
        found = set_up(ours, "ddp", groups, 1, config)
        assert found["expt_dp_group"] == found["intra_expt_dp_group"] == (5,)


# ---- several modules ----------------------------------------------------------------------------


@pytest.fixture
def modules():
    encoder = ProcessGroupCollection()
    llm = ProcessGroupCollection()
    return encoder, llm, MultiModuleProcessGroupCollection({"encoder": encoder, "llm": llm}, "llm")


# A MultiModuleProcessGroupCollection behaves like a dict of collections, apart from iteration,
# which yields the collections.
def test_modules_behave_like_a_dict(modules):
    encoder, llm, both = modules
    assert len(both) == 2
    assert both["encoder"] is encoder
    assert both["llm"] is llm
    assert list(both) == list(both.values()) == [encoder, llm]
    assert list(both.keys()) == ["encoder", "llm"]
    assert list(both.items()) == [("encoder", encoder), ("llm", llm)]
    assert both.get_module_collection("encoder") is encoder
    assert both.module_pgs == dict(both.items())
    assert both.language_model_module_name == "llm"


# An unknown module raises a ValueError that is also a KeyError. It names the existing modules.
def test_unknown_modules_raise(modules):
    both = modules[2]
    with pytest.raises(ValueError, match=r"'decoder'.*encoder.*llm"):
        both.get_module_collection("decoder")
    with pytest.raises(KeyError, match=r"'decoder'.*encoder.*llm"):
        both["decoder"]


# There must be at least one module, and the language model must be one of them.
@pytest.mark.parametrize(
    ("names", "language_model"), [([], None), ([], "llm"), (["encoder"], "llm"), (["llm"], "")]
)
def test_invalid_modules_raise(names, language_model):
    with pytest.raises(ValueError, match=r"module"):
        MultiModuleProcessGroupCollection(
            {name: ProcessGroupCollection() for name in names}, language_model
        )


# As in Megatron, a class with this metaclass rejects an assignment to one attribute. The error
# names the method to call instead.
@pytest.mark.parametrize("module", [our_config, their_config])
def test_helper_metaclass(module):
    class Helper(metaclass=module.ProcessGroupHelperMeta):
        other = 1

    Helper.other = 2
    with pytest.raises(AttributeError, match="set_virtual_pipeline_model_parallel_size"):
        Helper.virtual_pipeline_model_parallel_size = 2
