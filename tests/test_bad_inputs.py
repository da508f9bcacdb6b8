"""Bad inputs for every public function: a documented error, and nothing changed."""

import inspect
import json
import os
import re
import sys
import traceback
import types
import warnings
from collections import Counter
from datetime import timedelta

import attrs
import bad_inputs
import pytest
import torch
from bad_inputs import LAYOUT, Draws, HangError, OwnError, Stage, draw_call, look, patience
from hypothesis import find, settings
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy, integers

from hypercomm import (
    GridSet,
    HyperCommGrid,
    RankGroups,
    RankLayout,
    RankMapping,
    join,
    renew_world,
    testing,
    transfer,
    transfer_state,
)
from hypercomm.compat.deepspeed import Mpu, topology_axes
from hypercomm.compat.ezpz import tp as ezpz
from hypercomm.compat.megatron import parallel_state as mpu
from hypercomm.compat.megatron import presets, process_groups_config
from hypercomm.draw import Drawing
from hypercomm.errors import HyperCommError
from hypercomm.launch import run as launch
from hypercomm.launch.launchers import VARIABLES
from hypercomm.layout import Card, Placed, Traffic, difference, place
from hypercomm.layout import pipelines as stages
from hypercomm.layout.reading import notation
from hypercomm.process_groups.options import GroupOptions
from hypercomm.topology import Level, Topology, read_topology

pytestmark = pytest.mark.slow

WANTED = 20_000

LAYOUTS = [
    LAYOUT,
    RankLayout([2, 3], ["tp", "dp"], 3),
    RankLayout([2, 2, 2], ["tp", "pp", "dp"]).select(pp=1),
    RankLayout([1], ["tp"]),
    RankLayout([2, 2], ["tp", "dp"], ranks=[7, 0, 1, 4]),
]
GROUPS = [
    LAYOUT.groups("dp"),
    LAYOUT.groups("tp", "dp"),
    RankLayout([12], ["cp"]).groups("cp").levels([2, 3, 2])[1],
    RankLayout([2, 3], ["tp", "pp"]).groups("pp").pick(lambda ranks: (ranks[0], ranks[-1])),
    RankLayout([2, 2], ["tp", "dp"], ranks=[7, 0, 1, 4]).groups("dp"),
]
MAPPINGS = [
    RankMapping(LAYOUT, RankLayout([4, 2], ["tp", "dp"], 8)),
    RankMapping(LAYOUT, RankLayout([2, 4], ["cp", "dp"]), shards={"cp": 1, "tp": -1}),
    RankMapping(LAYOUT, RankLayout([8], ["dp"], ranks=[8, 1, 2, 3, 4, 5, 6, 7]), leaders=True),
    RankMapping(LAYOUT, RankLayout([3], ["tp"], 8), along=None, shards={"tp": 0}).inverse(),
]
DIFFERENCE = difference.difference(LAYOUT, RankLayout([4, 2], ["tp", "dp"]))

TRAFFIC = Traffic(5, "ring")
CARD = Card(hidden=8, layers=4, sequence=16, micro_batches=2, parameters=1000)
MACHINE = read_topology("2,4", 8)
PLACED = place(LAYOUT, on=MACHINE)

# Arguments that work, by the name of the parameter; "function.parameter" where it matters.
GOOD = {
    "RankLayout.from_json.text": LAYOUT.to_json,
    "RankLayout.from_order.sizes": lambda: {"tp": 2},
    "RankLayout.suggest.sizes": lambda: {"tp": 2, "dp": -1},
    "RankLayout.split.sizes": lambda: {"a": 1, "b": -1},
    "RankLayout.merge.name": lambda: "joined",
    "RankLayout.rename.names": lambda: {"tp": "a"},
    "RankLayout.select.coords": lambda: {"tp": 0},
    "RankLayout.rank.coords": lambda: {"tp": 0, "cp": 0, "dp": 1},
    "RankLayout.ranks_where.coords": lambda: {"tp": 0},
    "RankLayout.reorder.dims": lambda: ["dp", "tp", "cp"],
    "RankLayout.groups.dims": lambda: ["tp"],
    "RankGroups.levels.sizes": lambda: [1, 2],
    "RankGroups.pick.function": lambda: lambda ranks: ranks[:1],
    "HyperCommGrid.device_mesh.dims": lambda: ["dp"],
    "HyperCommGrid.device_mesh.flatten": lambda: None,
    "HyperCommGrid.share_with": lambda: None,
    "HyperCommGrid.register_view.shape": lambda: [4, 2],
    "HyperCommGrid.register_view.dim_names": lambda: ["ep", "dp"],
    "HyperCommGrid.register_view.shared_dims": lambda: ["dp"],
    "HyperCommGrid.reshape.target": lambda: "tp=4,dp=2",
    "HyperCommGrid.reshape.ranks": lambda: [7, 1, 2, 3, 4, 5, 6, 0],
    "HyperCommGrid.reshape.views": lambda: {"expert": "ep=2,expt_dp=4"},
    "HyperCommGrid.view.name": lambda: "expert",
    "HyperCommGrid.get_pg.view": lambda: None,
    "RankLayout.ranks": lambda: [8, 1, 2, 3, 4, 5, 6, 7],
    "RankMapping.source": lambda: LAYOUT,
    "RankMapping.target": lambda: RankLayout([4, 2], ["tp", "dp"], 8),
    "RankMapping.weights.shards": lambda: {"tp": 0},
    "RankMapping.weights.at": lambda: {"cp": 1},
    "RankMapping.rank": lambda: 1,
    "RankMapping.receives.rank": lambda: 8,
    "RankMapping.sources_of.rank": lambda: 8,
    "RankMapping.broadcast_siblings.rank": lambda: 8,
    "RankMapping.slices.pair": lambda: (0, 8),
    "RankMapping.shape": lambda: [8, 8, 8],
    "RankLayout.draw.groups": lambda: ["tp", "dp"],
    "HyperCommGrid.draw.groups": lambda: ["tp", "tp+dp"],
    "GridSet.draw.groups": lambda: ["tp", "tp+dp"],
    "Drawing.width": lambda: 60,
    "Drawing.color": lambda: True,
    "transfer.mapping": lambda: MAPPINGS[0],
    "transfer.tensor": lambda: torch.zeros(8, 8, 8),
    "transfer.groups": lambda: None,
    "transfer.out": lambda: None,
    "transfer.verify": lambda: True,
    "transfer_state.mapping": lambda: RankMapping(LAYOUT, LAYOUT, None),
    "transfer_state.state": lambda: {"a": torch.ones(2, 2)},
    "transfer_state.into": lambda: {"a": torch.zeros(2, 2)},
    "transfer_state.shards": lambda: {"*": {}},
    "transfer_state.bucket_bytes": lambda: 1 << 16,
    "transfer_state.start": lambda: 0,
    "transfer_state.verify": lambda: True,
    "GridSet.transfer.tensor": lambda: torch.zeros(8, 8, 8),
    "GridSet.transfer.groups": lambda: None,
    "GridSet.transfer.out": lambda: None,
    "GridSet.transfer.verify": lambda: True,
    "GridSet.roles": lambda: {"leaders": False},
    "RankMapping.leaders": lambda: False,
    "RankMapping.backward": lambda: False,
    "Mpu.grid": lambda: STAGE.grid,
    "Mpu.tp": lambda: "tp",
    "Mpu.pp": lambda: "pp",
    "Mpu.dp": lambda: ["dp"],
    "Mpu.sp": lambda: "cp",
    "topology_axes.layout": lambda: LAYOUT,
    "topology_axes.tp": lambda: "tp",
    "topology_axes.pp": lambda: "pp",
    "topology_axes.dp": lambda: ["cp", "dp"],
    "GridSet.source": lambda: "a",
    "GridSet.target": lambda: "b",
    "GridSet.requests": lambda: {"b": ["tp"]},
    "GridSet.grids": lambda: {"a": LAYOUT},
    "GridSet.arguments": dict,
    "create_megatron_pgs.grids": lambda: STAGE.grids,
    "megatron_requests.grid": lambda: STAGE.grid,
    "place.sizes": lambda: "tp=2,cp=2,dp=2",
    "place.traffic": lambda: {"tp": TRAFFIC, "dp": 3},
    "place.model": lambda: None,
    "place.overlapped": lambda: ["dp"],
    "place.weights": lambda: {"host": 2},
    "place.groups": lambda: ["tp+dp"],
    "place.proposals": lambda: True,
    "on": lambda: "4",
    "Card.traffic.layout": lambda: LAYOUT,
    "gpus_per_host": lambda: None,
    "Traffic.bytes": lambda: 4.5,
    "Traffic.pattern": lambda: "chain",
    "Traffic.overlapped": lambda: False,
    "Traffic.more": lambda: (Traffic(3),),
    "Card.hidden": lambda: 8,
    "Card.layers": lambda: 4,
    "Card.sequence": lambda: 16,
    "Card.micro_batches": lambda: 2,
    "Card.parameters": lambda: 1000,
    "Card.micro_batch_size": lambda: 2,
    "Card.experts": lambda: 4,
    "Card.topk": lambda: 2,
    "Card.expert_parameters": lambda: 100,
    "Card.key_value_hidden": lambda: 4,
    "Card.dtype": lambda: "bf16",
    "Card.gradient_dtype": lambda: "fp32",
    "Card.overlap": lambda: True,
    "Card.read.fields": lambda: attrs.asdict(CARD),
    "Level.name": lambda: "host",
    "Level.of_rank": lambda: [0, 0, 1, 1],
    "Level.names": lambda: ["a", "b"],
    "Level.of.units": lambda: ["a", "a", "b"],
    "Topology.levels": lambda: MACHINE.levels,
    "Topology.level.name": lambda: "host",
    "Placed.level": lambda: "domain",
    "Placed.kind": lambda: "given",
    "Placed.text_for.kind": lambda: "order",
    "along": lambda: "dp",
    "batch_axis": lambda: 0,
    "shards": lambda: {"cp": 1},
    "pipeline": lambda: "pp",
    "chain": lambda: [LAYOUT, LAYOUT],
    "groups": lambda: LAYOUT.groups("tp"),
    "source": lambda: LAYOUT,
    "target": lambda: LAYOUT,
    "before": lambda: LAYOUT,
    "after": lambda: RankLayout([4, 2], ["tp", "dp"]),
    "view": lambda: "expert",
    "names": lambda: ["a", "b"],
    "layouts": lambda: {"a": "tp=2,dp=4"},
    "inference": lambda: {"tp": 4},
    "beside": lambda: False,
    "requires": lambda: "any",
    "overrides": lambda: {"a": {"backend": "fake"}},
    "parse_sizes.text": lambda: "tp=2,dp",
    "parse_order.text": lambda: "tp-dp",
    "parse_groups.text": lambda: "tp,dp+cp",
    "simulate.function": lambda: int,
    "simulate.world_size": lambda: 2,
    "simulate.ranks": lambda: [0, 1],
    "simulate.args": lambda: (),
    "join.rank": lambda: 0,
    "join.size": lambda: 2,
    "join.local_rank": lambda: 0,
    "join.address": lambda: "127.0.0.1",
    "join.port": lambda: 29500,
    "join.device": lambda: "cpu",
    "join.timeout": lambda: timedelta(seconds=1),
    "join.environment": lambda: {"RANK": "0", "WORLD_SIZE": "2"},
    "join.need_launcher": lambda: False,
    "renew_world.ranks": lambda: [1, 0],
    "renew_world.store": lambda: None,
    "renew_world.timeout": lambda: timedelta(seconds=1),
    "run_ranks.function": lambda: os.getpid,
    "run_ranks.args": lambda: (),
    "fake_world.rank": lambda: 3,
    "layouts.dims_required": lambda: ["tp"],
    "views_of.layout": lambda: LAYOUT,
    "views_of.dim_names": lambda: ["ep", "etp", "edp"],
    "views_of.shared_dims": lambda: ["dp"],
    "mappings.dim_names": lambda: ["tp", "dp"],
    "mappings.along": lambda: "dp",
    "mappings.beside": lambda: True,
    "shardings.shape": lambda: [8, 6],
    "grids.views": lambda: True,
    "given_ranks.strategies": lambda: [integers()],
    "given_ranks.ranks": lambda: 2,
    "given_ranks.ranks_max": lambda: 4,
    "given_ranks.max_examples": lambda: 3,
    "given_ranks.timeout": lambda: 5.0,
    "given_ranks.named": dict,
    "local_ranks.rank": lambda: 3,
    "RankGenerator.order": lambda: "tp-cp-ep-dp-pp",
    "RankGenerator.ep": lambda: 1,
    "RankGenerator.get_mask.order": lambda: "tp-dp",
    "ensure_divisibility.numerator": lambda: 6,
    "divide_and_check_no_remainder.numerator": lambda: 6,
    "args": lambda: (),
    "arguments": dict,
    "backend": lambda: "gloo",
    "by": lambda: 1,
    "context_parallel_size": lambda: 2,
    "cover": lambda: "any",
    "cp": lambda: 1,
    "creation": lambda: "local",
    "denominator": lambda: 3,
    "derive": lambda: lambda groups: groups.chunks(1),
    "dim": lambda: "tp",
    "dim_names": lambda: ["tp", "cp", "dp"],
    "dims": lambda: ["tp"],
    "dp": lambda: 2,
    "edges": lambda: "chain",
    "expert_model_parallel_size": lambda: 2,
    "group_desc": lambda: "described",
    "index": lambda: 0,
    "itemsize": lambda: 2,
    "kwargs": dict,
    "layout": lambda: LAYOUT,
    "mask": lambda: [True, False, True],
    "name": lambda: "named",
    "nprocs": lambda: 2,
    "numerator": lambda: 6,
    "order": lambda: "tp-cp-ep-dp-pp",
    "parallel_size": lambda: [2, 2, 2],
    "periodic": lambda: True,
    "pipeline_model_parallel_size": lambda: 2,
    "pipelines": lambda: ["dp"],
    "pp": lambda: 2,
    "progress": lambda: False,
    "rank": lambda: 5,
    "rank_offset": lambda: 0,
    "ranks": lambda: [0, 1, 4, 5],
    "requests": lambda: ["tp", ["tp", "dp"]],
    "shape": lambda: [2, 2, 2],
    "share": lambda: "identical",
    "size": lambda: 1,
    "state": mpu.ParallelState,
    "strides": lambda: [1, 2, 4],
    "tensor_model_parallel_size": lambda: 2,
    "tensor_parallel_size": lambda: 2,
    "text": lambda: "tp=2,cp=2,dp=2",
    "timeout": lambda: timedelta(minutes=1),
    "token": lambda: "tp-dp",
    "tp": lambda: 2,
    "world_size": lambda: 8,
}

# What is not called, and why.
LEFT_OUT = {
    "RankGroups.members": "its docstring says that neither argument is checked",
    "RankGroups.index": "collections.abc.Sequence's: a ValueError for what is not there",
    "RankGroups.count": "collections.abc.Sequence's: it compares",
    "notation.format_sizes": "writes what was checked",
    "notation.format_coords": "writes what was checked",
    "Placed.write": "makes files; layout/test_placing.py has its bad calls",
    "Drawing.save": "writes files; draw/test_drawing_files.py has its bad calls",
    "HyperCommGrid.watch": "makes folders and a thread; tools/blame has its bad calls",
    "LocalRanks": "made by local_ranks, whose arguments are; test_local_ranks.py has its methods",
    "Simulation": "made by simulate, whose arguments are",
    "create_group": "torch.distributed.new_group, whose errors are torch's",
    "get_embedding_ranks": "a default, called with ranks of ours",
    "GlobalMemoryBuffer": "takes no arguments; its tensors are torch's, and so are their errors",
    "GridSet.get": "collections.abc.Mapping's: None for what is not there",
    "GlobalSymmetricMemoryBuffer": "hands its arguments to torch",
}

# What takes anything, or nothing at all, and so refuses nothing.
REFUSES_NOTHING = {
    "HyperCommGrid.find",
    "HyperCommGrid.print_once",
    "RankGroups.has_member",
    "is_rank_in_embedding_group",
    *(name for name in vars(mpu) if name.startswith("set_")),
}

# Many arguments need many calls, for each to be wrong some time.
MANY_ARGUMENTS = {
    "HyperCommGrid",
    "HyperCommGrid.from_layout",
    "HyperCommGrid.create_pg",
    "ParallelState.create",
    "GridSet",
    "GridSet.tile",
    "GridSet.colocated",
    "megatron_grids",
    "create_megatron_pgs",
    "megatron_requests",
    "TensorParallelState.create",
    "ezpz.initialize_tensor_parallel",
    "initialize_model_parallel",
}


@attrs.frozen
class Target:
    """A public function: its name, where it is called, and how it is found there."""

    name: str
    stages: tuple[str, ...]
    find: object
    signature: inspect.Signature
    receivers: tuple[object, ...] = ()
    is_compat: bool = False
    allowed: tuple[type[Exception], ...] = ()

    def __str__(self):
        return self.name


def signature_of(function, *, bound=False):
    """What a function takes, with each keyword that a TypedDict names."""
    found = inspect.signature(function)
    parameters = list(found.parameters.values())[bound:]
    unpacked = parameters and re.fullmatch(r"Unpack\[(\w+)\]", str(parameters[-1].annotation))
    if unpacked and unpacked[1] in function.__globals__:
        named = inspect.get_annotations(function.__globals__[unpacked[1]])
        parameters[-1:] = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in named.items()
            if name not in found.parameters
        ]
    return found.replace(parameters=parameters)


def methods_of(kind, prefix, stages, receivers=(), find=None, extra=()):
    """The public functions of a class, and some that are named."""
    for name in sorted({*(name for name in dir(kind) if not name.startswith("_")), *extra}):
        static = inspect.getattr_static(kind, name)
        if not callable(getattr(kind, name)) or f"{prefix}.{name}" in LEFT_OUT:
            continue
        of_class = isinstance(static, classmethod | staticmethod)
        function = getattr(kind, name)
        signature = signature_of(function, bound=not of_class)
        if of_class:
            yield Target(f"{prefix}.{name}", stages, lambda _, f=function: f, signature)
        else:
            finder = find or (lambda receiver, n=name: getattr(receiver, n))
            if find is not None:
                finder = lambda _, n=name: getattr(find(), n)  # noqa: E731
            yield Target(f"{prefix}.{name}", stages, finder, signature, receivers)


def functions_of(module, stages):
    """The public functions and classes of ours that a module has."""
    for name, value in sorted(vars(module).items()):
        ours = (getattr(value, "__module__", "") or "").startswith(
            module.__name__.rpartition(".")[0]
        )
        if name.startswith("_") or not ours or name in LEFT_OUT:
            continue
        helper = getattr(value, "__module__", "").endswith(
            (".getters", ".configuration", ".layouts")
        )
        if isinstance(value, types.FunctionType) and not helper:
            yield Target(name, stages, lambda _, f=value: f, inspect.signature(value))


STAGE = Stage()


class WrongError(AssertionError):
    """A call raised what is not documented."""


class ChangedError(AssertionError):
    """A call that was refused changed something."""


def is_misfit(error):
    """Tell whether a call did not fit the signature: raised at the call itself.

    Or at one behind it, of a name that it hands on.
    """
    depth = len(list(traceback.walk_tb(error.__traceback__)))
    most = 4 if "unexpected keyword argument" in str(error) else 1
    return isinstance(error, TypeError) and depth <= most


def is_callers(error):
    """Tell whether a function that the call was given raised this itself."""
    if isinstance(error, HangError):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_code.co_filename == bad_inputs.__file__


def hash_of(receiver):
    try:
        return hash(receiver)
    except TypeError:
        return None


def differences(before, after):
    """Name what is no longer as it was."""
    names = [name for name in before[0] if before[0][name] != after[0][name]]
    return names + ["the receiver"] * (before[1:] != after[1:])


EMPTY = ("nothing",)
NO_FILE = (FileNotFoundError, IsADirectoryError)  # the operating system's, as Megatron raises them
IN_GRID = ("grid", "grid", "grid", "grid", "outside", "destroyed")
IN_SET = ("set",)


def constructor(kind, stages):
    return Target(kind.__name__, stages, lambda _: kind, inspect.signature(kind))


def creator(name, kind, like, stages):
    allowed = NO_FILE if kind is mpu.ParallelState else ()
    return Target(name, stages, lambda _: kind.create, inspect.signature(like), allowed=allowed)


def _check_options(**options):
    GroupOptions(**options).check()


def targets():
    yield from own_targets()
    for target in compat_targets():
        yield attrs.evolve(target, is_compat=True)


def own_targets():
    yield constructor(RankLayout, EMPTY)
    yield from methods_of(RankLayout, "RankLayout", EMPTY, tuple(LAYOUTS))
    yield from methods_of(RankGroups, "RankGroups", EMPTY, tuple(GROUPS))
    yield Target(
        "RankGroups.__getitem__",
        EMPTY,
        lambda receiver: receiver.__getitem__,
        signature_of(RankGroups.__getitem__, bound=True),
        tuple(GROUPS),
        allowed=(IndexError,),  # a sequence's
    )
    for target in functions_of(notation, EMPTY):
        if target.name.startswith("parse"):
            yield target
    yield constructor(RankMapping, EMPTY)
    yield from methods_of(RankMapping, "RankMapping", EMPTY, tuple(MAPPINGS))
    yield Target("transfer", ("world", "nothing"), lambda _: transfer, inspect.signature(transfer))
    yield Target("join", ("nothing", "world"), lambda _: join, inspect.signature(join))
    signature = inspect.signature(renew_world)
    yield Target("renew_world", ("world", "nothing"), lambda _: renew_world, signature)
    signature = inspect.signature(transfer_state)
    yield Target("transfer_state", ("world", "nothing"), lambda _: transfer_state, signature)
    for target in functions_of(stages, EMPTY):
        if target.find(None).__module__ == stages.__name__:
            yield target
    for function in (place, read_topology):
        finder = lambda _, f=function: f  # noqa: E731
        yield Target(function.__name__, EMPTY, finder, inspect.signature(function))
    for kind, one in ((Traffic, TRAFFIC), (Card, CARD), (Topology, MACHINE)):
        yield constructor(kind, EMPTY)
        yield from methods_of(kind, kind.__name__, EMPTY, (one,))
    yield constructor(Level, EMPTY)
    yield from methods_of(Level, "Level", EMPTY, MACHINE.levels)
    yield from methods_of(Placed, "Placed", EMPTY, (PLACED,))
    compare = difference.difference
    yield Target("difference", EMPTY, lambda _: compare, inspect.signature(compare))
    yield from methods_of(type(DIFFERENCE), "LayoutDifference", EMPTY, (DIFFERENCE,))
    yield from methods_of(Drawing, "Drawing", EMPTY, (LAYOUT.draw(), DIFFERENCE.draw()))
    yield constructor(GridSet, ("world", "nothing"))
    yield from methods_of(GridSet, "GridSet", IN_SET, find=lambda: STAGE.grids)
    for name in ("megatron_grids", "create_megatron_pgs", "megatron_requests"):
        function = getattr(presets, name)
        finder = lambda _, f=function: f  # noqa: E731
        yield Target(name, IN_SET, finder, signature_of(function), allowed=NO_FILE)
    yield constructor(HyperCommGrid, ("world", "nothing"))
    yield from methods_of(
        HyperCommGrid,
        "HyperCommGrid",
        IN_GRID,
        find=lambda: STAGE.grid,
        extra=("_gen_rank_enum", "_order_dims"),
    )
    yield Target(
        "GroupOptions.check", EMPTY, lambda _: _check_options, inspect.signature(GroupOptions)
    )
    for name in testing.__all__:
        function = getattr(testing, name)
        if name not in LEFT_OUT:
            allowed = (InvalidArgument,) if testing._HOMES[name].endswith("strategies") else ()
            signature = inspect.signature(function)
            yield Target(name, EMPTY, lambda _, f=function: f, signature, allowed=allowed)


def compat_targets():
    for target in functions_of(mpu, ("mpu", "world")):
        if target.name == "initialize_model_parallel":
            stages = ("world", "world", "world", "mpu", "nothing")
            yield attrs.evolve(target, stages=stages, allowed=NO_FILE)
        else:
            yield target
    yield constructor(mpu.RankGenerator, EMPTY)
    generator = mpu.RankGenerator(2, 1, 2, 2, 1, "tp-cp-ep-dp-pp")
    yield from methods_of(mpu.RankGenerator, "RankGenerator", EMPTY, (generator,))
    yield creator(
        "ParallelState.create",
        mpu.ParallelState,
        mpu.initialize_model_parallel,
        ("world", "world", "nothing"),
    )
    collection = process_groups_config.ProcessGroupCollection
    yield constructor(collection, EMPTY)
    yield from methods_of(collection, "ProcessGroupCollection", ("mpu", "world"))
    multi = process_groups_config.MultiModuleProcessGroupCollection
    yield constructor(multi, EMPTY)
    yield from methods_of(multi, multi.__name__, EMPTY, (multi({"a": collection()}),))
    yield constructor(Mpu, IN_GRID)
    yield Target("topology_axes", EMPTY, lambda _: topology_axes, inspect.signature(topology_axes))
    for target in functions_of(ezpz, ("ezpz", "world")):
        starts = target.name == "initialize_tensor_parallel"
        stages = ("world", "world", "world", "ezpz", "nothing") if starts else target.stages
        yield attrs.evolve(target, name=f"ezpz.{target.name}", stages=stages)
    yield creator(
        "TensorParallelState.create",
        ezpz.TensorParallelState,
        ezpz.initialize_tensor_parallel,
        ("world", "world", "nothing"),
    )


TARGETS = list(targets())


def good_for(target):
    """Find arguments that work, the most specific first."""
    owner, _, _ = target.name.partition(".")

    def good(parameter):
        for key in (f"{target.name}.{parameter}", f"{owner}.{parameter}", parameter):
            if key in GOOD:
                return GOOD[key]
        return None

    return good


class ReachedError(Exception):
    """`run_ranks` was about to start processes, or `join` to meet others: it takes these."""


def _reached(*_):
    raise ReachedError


def simplest(strategy):
    """Draw what a strategy shrinks to, which is one value wherever the tests run."""
    return find(strategy, lambda _: True, settings=settings(max_examples=1, database=None))


def outcome(target, draws):
    """Make one drawn call: "refused", "accepted" or "own"; anything else is an error."""
    STAGE.enter(draws.choice(target.stages))
    receiver = draws.choice(target.receivers) if target.receivers else None
    function = target.find(receiver)
    call = draw_call(draws, target.name, target.signature, good_for(target))
    result, wrong = "accepted", None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = STAGE.seen(), str(receiver), hash_of(receiver)
        try:
            with patience():
                made = function(*call.args, **call.kwargs)
                look(simplest(made) if isinstance(made, SearchStrategy) else made)
        except (HyperCommError, *target.allowed):
            result = "refused"
        except (OwnError, ReachedError):
            result = "own"
        except (Exception, HangError) as error:  # noqa: BLE001 - the question is which
            result = "own"
            wrong = None if is_misfit(error) or is_callers(error) else error
        after = STAGE.seen(), str(receiver), hash_of(receiver)
        changed = differences(before, after) if result != "accepted" else []
    if wrong is not None or changed or (result == "accepted" and target.stages != EMPTY):
        STAGE.leave()
    of = "" if receiver is None else f" of {receiver!r}"
    left = f" and changed {changed}" if changed else ""
    if wrong is not None:
        raise WrongError(f"{call!r}{of} raised {type(wrong).__name__}: {wrong}{left}") from wrong
    if changed:
        raise ChangedError(f"{call!r}{of} was refused{left}")
    return result


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    """Let `run_ranks` stop before it starts processes, and have no world before or after."""
    for variable in (*VARIABLES, "HYPERCOMM_VERIFY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(launch, "_started", _reached)
    monkeypatch.setattr(sys.modules["hypercomm.joining.join"], "_initialise", _reached)
    yield
    STAGE.leave()


@pytest.fixture(scope="session")
def counted(tmp_path_factory):
    """Where the tests of all targets, on whatever worker, leave what became of the calls."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "counted"
    folder.mkdir(exist_ok=True)
    return folder


def calls_of(target):
    if target.name in MANY_ARGUMENTS:
        return 800
    return 130 if target.is_compat else 450


# A call with bad arguments raises a documented error of ours, and leaves everything as it was. All
# of them together are enough, and each function refuses something.
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_bad_calls_are_refused(target, counted):
    counts = Counter()
    draws = Draws(target.name)
    try:
        for _ in range(calls_of(target)):
            counts[outcome(target, draws)] += 1
    except (ChangedError, WrongError) as error:
        counts["changed" if isinstance(error, ChangedError) else "wrong"] += 1
        raise
    finally:
        half = counted / f"{target.name}.half"
        half.write_text(json.dumps(counts))
        half.rename(half.with_suffix(".json"))
    found = sorted(counted.glob("*.json"))
    if len(found) == len(TARGETS):  # the last one looks at all of them
        check_totals({file.stem: Counter(json.loads(file.read_text())) for file in found})


def check_totals(counts):
    """Every public function refuses something, but for those listed; there were calls enough."""
    totals = sum(counts.values(), Counter())
    refusing = [name for name, of_name in counts.items() if of_name["refused"]]
    print(
        f"\nbad inputs: {totals['refused']:,} calls of {len(refusing)} public functions refused, "
        f"{totals['wrong']} wrong errors, {totals['changed']} changed states; "
        f"{totals['accepted']:,} calls worked"
    )
    silent = {
        target.name
        for target in TARGETS
        if target.signature.parameters and not counts[target.name]["refused"]
    }
    assert silent == REFUSES_NOTHING
    assert totals["refused"] >= WANTED
