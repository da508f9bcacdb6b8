"""Test process group collections against Megatron's: fields, states, grids, optimizer, DDP."""

import dataclasses
from types import SimpleNamespace

import megatron_comparison as comparison
import pytest
import torch.distributed as dist
from megatron_comparison import THEIR_FIELDS as FIELDS, TheirCollection

from hypercomm import HyperCommGrid
from hypercomm.compat.megatron import ParallelState, process_groups_config as our_config, version
from hypercomm.compat.megatron.process_groups_config import ProcessGroupCollection
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
        with pytest.raises(ValueError, match=f"field '{name}' was not set.*0.16.*'{other}'"):
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


# ---- names of the installed release -------------------------------------------------------------


# The groups for an optimizer and for DDP, and the names that only Megatron's own code uses, come
# from the installed release. test_state_matches_megatron compares the groups.
def test_names_of_the_installed_release():
    with fake_world(WORLD_SIZE), HyperCommGrid([2, 8], ["tp", "dp"]) as grid:
        given = {"dp": grid.create_pg("dp"), "expt_dp": None, "mp": None, "tp_ep_pp": None}
        model = SimpleNamespace(config=SimpleNamespace(context_parallel_size=1))
        found, expected = (
            kind.setup_process_groups_for_optimizer(kind(**given), [model], False) for kind in KINDS
        )
        assert found == expected
    helper = our_config.ProcessGroupHelperMeta("Helper", (), {})
    with pytest.raises(AttributeError, match="set_virtual_pipeline_model_parallel_size"):
        helper.virtual_pipeline_model_parallel_size = 2
    with pytest.raises(AttributeError, match="no attribute 'Collection'"):
        _ = our_config.Collection


# The weights are shared if a group of GTP peers has several ranks.
def test_gtp_is_active():
    active = ProcessGroupCollection.is_gtp_remat_active
    with fake_world(WORLD_SIZE):
        pair, alone = dist.new_group([0, 1]), dist.new_group([0])
        assert active({"gtp_remat_group": None, "expt_gtp_remat_group": pair})
        assert not active({"gtp_remat_group": alone, "tp_group": pair})
