"""Test process group collections against Megatron's: fields, states, grids, optimizer, DDP."""

import dataclasses
import itertools
from types import SimpleNamespace
from unittest import mock

import megatron_comparison as comparison
import pytest
import torch.distributed as dist
from megatron_comparison import THEIR_FIELDS as FIELDS
from megatron_comparison import TheirCollection, ddp_config, set_up
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

HIDES_NONE = "unset_is_none" in version.changes()
UNKNOWN = ("dpcp", "size")
EVERY = [field.name for field in dataclasses.fields(ProcessGroupCollection)]

WORLD_SIZE = 16
KINDS = (ProcessGroupCollection, TheirCollection)


# ---- fields -------------------------------------------------------------------------------------


# The collection has the fields of all releases of Megatron, in Megatron's order.
def test_fields_match_megatron():
    assert [name for name in EVERY if name in FIELDS] == FIELDS


# A field that was not set is None, whether other fields were set or not. In Megatron 0.16, reading
# it raises AttributeError, so hasattr() is false.
@pytest.mark.parametrize("name", ["tp", "hcp", "expt_dp_ag"])
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
            assert repr(TheirCollection(**chosen)) == text


# ---- collections of grids -----------------------------------------------------------------------


def grids():
    """Return a dense and an expert grid of 16 ranks, as MATRIX["experts"] with one instance."""
    dense = HyperCommGrid([2, 1, 4, 2], ["tp", "cp", "dp", "pp"])
    return dense, HyperCommGrid([1, 4, 2, 2], ["tp", "ep", "dp", "pp"])


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


def assert_same(found, expected):
    """Assert equal keys and groups, or an error that code for Megatron's error catches."""
    if isinstance(expected, Exception):
        assert isinstance(found, type(expected)), f"{expected!r} was {found!r}"
    else:
        newer = {key for key in found if "gtp_remat" in key} - expected.keys()
        assert {key: group for key, group in found.items() if key not in newer} == expected


CONFIGS = [ddp_config(*flags) for flags in itertools.product([1, 2], [False, True])]


@pytest.fixture
def some_groups():
    """Create a different group for each field, so that a mix-up is found."""
    with fake_world(WORLD_SIZE):
        pairs = {name: dist.new_group([0, 1 + at]) for at, name in enumerate(FIELDS[:15])}
        triples = {name: dist.new_group([0, at, 15]) for at, name in enumerate(FIELDS[15:], 1)}
        yield pairs | triples


# For a collection that lacks one, two, all but one or all fields, in any combination, the groups or
# errors match Megatron's. An empty collection is different from None, which selects the state.
@pytest.mark.parametrize(("gloo", "cp_size"), [(False, None), (False, 1), (False, 2), (True, 1)])
@pytest.mark.parametrize("what", NEEDED)
def test_setup_from_a_collection_matches_megatron(what, cp_size, gloo, some_groups):
    fields = NEEDED[what]
    lacking = [*itertools.chain.from_iterable(itertools.combinations(fields, n) for n in (0, 1, 2))]
    lacking += [tuple(name for name in fields if name != only) for only in (*fields, None)]
    rejected = accepted = 0
    for lacks, config in itertools.product(
        lacking, [*CONFIGS, *([None] if what == "optimizer" else [])]
    ):
        given = {name: some_groups[name] for name in fields if name not in lacks}
        found, expected = (set_up(kind, what, given, cp_size, config, gloo) for kind in KINDS)
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
    for kind in KINDS:
        given = kind(**{name: some_groups[name] for name in ("dp", "expt_dp", "mp", "tp_ep_pp")})
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
        found = set_up(ProcessGroupCollection, "ddp", groups, 1, CONFIGS[0])
        assert found["expt_dp_group"] == found["intra_expt_dp_group"] == (5,)


# ---- several modules ----------------------------------------------------------------------------


# A MultiModuleProcessGroupCollection behaves like a dict of collections, apart from iteration,
# which yields the collections. Unknown modules raise a ValueError that is also a KeyError.
def test_several_modules():
    encoder, llm = ProcessGroupCollection(), ProcessGroupCollection(cp=mock.Mock(size=lambda: 2))
    both = MultiModuleProcessGroupCollection({"encoder": encoder, "llm": llm}, "llm")
    assert len(both) == 2
    assert list(both) == list(both.values()) == [encoder, llm]
    assert dict(both.items()) == both.module_pgs
    assert list(both.keys()) == ["encoder", "llm"]
    assert both["encoder"] is both.get_module_collection("encoder") is encoder
    assert both.has_language_model()
    assert both.get_language_model_collection() is llm
    assert both.get_language_model_cp_size() == 2
    for error in (ValueError, KeyError):
        with pytest.raises(error, match=r"'decoder'.*encoder.*llm"):
            both["decoder"]
    for names, language_model in (([], None), (["encoder"], "llm"), (["llm"], "")):
        with pytest.raises(ValueError, match="module"):
            MultiModuleProcessGroupCollection(dict.fromkeys(names), language_model)
    with pytest.raises(ValueError, match="none of"):
        MultiModuleProcessGroupCollection({"encoder": encoder}).get_language_model_collection()


# As in Megatron, a class with this metaclass rejects an assignment to one attribute. The error
# names the method to call instead.
@pytest.mark.parametrize("module", [our_config, their_config])
def test_helper_metaclass(module):
    class Helper(metaclass=module.ProcessGroupHelperMeta):
        other = 1

    Helper.other = 2
    with pytest.raises(AttributeError, match="set_virtual_pipeline_model_parallel_size"):
        Helper.virtual_pipeline_model_parallel_size = 2
