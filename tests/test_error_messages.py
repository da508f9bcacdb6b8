"""Test that each common mistake raises its error class, and names the argument and the value."""

import math
import pickle
import threading
from datetime import timedelta

import pytest
from group_checks import tables

from hypercomm import (
    GridSet,
    GroupRequest,
    HyperCommGrid,
    RankLayout,
    RankMapping,
    draw,
    errors,
    live_topology,
    megatron_grids,
    place,
    read_topology,
    renew_world,
    run_ranks,
    torchtitan_grids,
)
from hypercomm.compat.deepspeed import Mpu, process_topology
from hypercomm.compat.ezpz import TensorParallelState
from hypercomm.compat.megatron import ParallelState, parallel_state
from hypercomm.errors import (
    GridDestroyedError,
    GroupExistsError,
    GroupMissingError,
    GroupOptionsError,
    HyperCommError,
    LayoutError,
    NotInitializedError,
    RankFailedError,
    RankOutsideError,
    ToolError,
    UnknownDimError,
    WorldSizeError,
)
from hypercomm.launch import report
from hypercomm.layout import RankGroups, read_layout
from hypercomm.layout.difference import MOST_DIMS, difference
from hypercomm.testing import fake_world
from hypercomm.tools.place import Level, Topology, Traffic
from hypercomm.training import clip_grad_norm_, grad_norm

LAYOUT = RankLayout([2, 2, 2], ["tp", "cp", "dp"])
DP = LAYOUT.groups("dp")
MAPPING = RankMapping("dp=2", "dp=4")
SWAPPED = RankLayout([2], ["tp"], ranks=[1, 0])
LISTED = RankLayout([2, 2], ["tp", "dp"], ranks=[3, 1, 7, 5])
MANY_DIMS = RankLayout([2] * (MOST_DIMS + 1), [f"d{index}" for index in range(MOST_DIMS + 1)])
HALVES = RankMapping("dp=2", RankLayout([3, 2], ["cp", "dp"], 2))
FOUR = "tp=2,dp=2"


def listed(ranks, **arguments):
    return RankLayout([2, 2], ["tp", "dp"], ranks=ranks, **arguments)


def grid(*arguments, **options):
    return HyperCommGrid(*arguments, **{"world_size": 8, **options})


def set_of(world_size, **grids):
    return GridSet(world_size=world_size, **grids)


def reconfigured(**options):
    return HyperCommGrid("tp=8", enable_reconfigure=True, **options)


def created(call):
    """Call with a grid of 8 ranks, as rank 5, with dp groups. The call may not change anything."""

    def called():
        with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
            grid.create_pg("dp")
            before = tables()
            groups = dict(grid.pgs)
            try:
                call(grid)
            finally:
                assert grid.is_destroyed or (tables(), dict(grid.pgs)) == (before, groups)
                assert grid.is_destroyed or grid.create_pg("tp").size() == 2

    return called


def viewed(call):
    """Call with a grid of 8 ranks that has a view "expert"."""

    def called():
        grid = HyperCommGrid([2, 4], ["tp", "dp"], world_size=8)
        grid.register_view("expert", [4, 2], ["ep", "edp"])
        call(grid)

    return called


def after_destroy(grid):
    grid.destroy()
    grid.create_pg("tp")


# Each entry has the call, its error, and parts of the message: the argument, the value, or a fix.
LAYOUTS = [
    (lambda: RankLayout([2, 4], ["tp"]), LayoutError, "shape", "dim_names", "['tp']"),
    (lambda: RankLayout([], []), LayoutError, "at least one dim"),
    (lambda: RankLayout([2, 0], ["tp", "dp"]), LayoutError, "'dp'", "at least 1", "0"),
    (lambda: RankLayout([2, -4], ["tp", "dp"]), LayoutError, "'dp'", "-4"),
    (lambda: RankLayout([2, 4.0], ["tp", "dp"]), LayoutError, "'dp'", "int", "4.0"),
    (lambda: RankLayout([2], "tp"), LayoutError, "dim_names", "sequence", "'tp'"),
    (lambda: RankLayout([2], {"tp"}), LayoutError, "dim_names", "order"),
    (lambda: RankLayout([2, 4], ["tp", "tp"]), LayoutError, "dim_names", "'tp'"),
    (lambda: RankLayout([2, 4], ["tp", ""]), LayoutError, "dim name", "''"),
    (lambda: RankLayout([2], ["tp-cp"]), LayoutError, "dim name", "'tp-cp'"),
    (lambda: RankLayout([2], ["t\x1bp"]), LayoutError, "dim name", "printable"),
    (lambda: RankLayout([2], ["tp"], -1), LayoutError, "rank_offset", "-1"),
    (lambda: RankLayout(tp=2, rank_ofset=3), TypeError, "'rank_ofset'", "'rank_offset'"),
    (lambda: HyperCommGrid(tp=2, worldsize=8), TypeError, "'worldsize'", "'world_size'"),
    (lambda: LAYOUT.groups("pp"), UnknownDimError, "'pp'", "('tp', 'cp', 'dp')"),
    (lambda: LAYOUT.groups("tp", "tp"), LayoutError, "'tp'", "twice"),
    (LAYOUT.groups, LayoutError, "no dims are given", "('tp', 'cp', 'dp')"),
    (lambda: LAYOUT.coords(8), RankOutsideError, "rank 8", "tp=2,cp=2,dp=2", "0..7"),
    (lambda: LAYOUT.coords(1.0), RankOutsideError, "rank", "1.0"),
    (lambda: DP.of(8), RankOutsideError, "rank 8"),
    (lambda: DP[4], IndexError, "4"),
    (lambda: DP.chunks(3), LayoutError, "3", "each group, 2"),
    (lambda: LAYOUT.rank(tp=1), LayoutError, "['cp', 'dp']"),
    (lambda: LAYOUT.rank(tp=2, cp=0, dp=0), LayoutError, "'tp'", "range(2)", "2"),
    (lambda: LAYOUT.split("dp", a=3, b=1), LayoutError, "'dp'", "a=3"),
    (lambda: RankLayout.from_json("{}"), LayoutError, "sizes are missing"),
    (lambda: RankLayout([2, 4]), LayoutError, "dim_names are missing"),
    (lambda: RankLayout("tp=2", dp=2), LayoutError, "given twice: 'tp=2'"),
    (lambda: RankLayout(LAYOUT, ["tp"]), LayoutError, "already has dims"),
    (lambda: RankLayout({"tp": "2"}), LayoutError, "'tp'", "'2'"),
    (lambda: RankLayout(tp=2, strides=[0]), LayoutError, "strides", "0"),
    (lambda: RankLayout(tp=2, dp=2, strides=[2]), LayoutError, "strides", "got (2,)"),
    (lambda: RankLayout(tp=2, dp=2, strides=[1, 1]), LayoutError, "strides (1, 1) overlap"),
    (lambda: RankLayout(tp=2**20, dp=2**20), LayoutError, "2147483647"),
    (lambda: listed([0, 1, 1, 3]), LayoutError, "rank 1 is listed twice in ranks"),
    (lambda: listed([0, 1, 2]), LayoutError, "ranks= contains 3 ranks, ", " 4 positions"),
    (lambda: listed([0, 1, 2, 2**31]), LayoutError, "ranks", "2147483648"),
    (lambda: listed(LISTED.ranks, rank_offset=4), LayoutError, "rank_offset=4"),
    (lambda: listed(LISTED.ranks, strides=[1, 4]), LayoutError, "strides= and ranks="),
    (lambda: RankLayout("tp=2,dp=2", strids=[1, 2]), TypeError, "did you mean 'strides'"),
    (lambda: read_layout("tp8,dp4"), LayoutError, "did you mean 'tp=8,dp=4'"),
    (lambda: LISTED.select(tp=0, dp=1), LayoutError, "these coordinates, 7"),
    (lambda: LAYOUT.shift(0, "xp", 1), UnknownDimError, "'xp'"),
    (lambda: LAYOUT.split("dp"), LayoutError, "'dp'", "sizes are missing"),
    (lambda: LAYOUT.rename(tp="dp"), LayoutError, "'dp' is listed twice"),
    (lambda: LAYOUT.renumber([5], ["x"]), LayoutError, "x=5 has 5 ranks, ", " has 8"),
    (lambda: RankLayout.from_json("[]"), LayoutError, "is not the JSON form"),
    (lambda: RankLayout.from_json('{"shape": [' + "9" * 5000), LayoutError, "is not the JSON form"),
    (lambda: RankLayout({"d" * 9000: 2}), LayoutError, "at most 255 characters, got 9000"),
    (lambda: RankLayout.fit(8, tp=3, dp=0), LayoutError, "'dp'", "0"),
    (lambda: LAYOUT.groups("tp,dp"), LayoutError, "'tp,dp'", "'tp+dp'"),
    (lambda: LAYOUT.groups("tp+"), LayoutError, "'tp+'"),
    (lambda: LAYOUT.groups("TP"), UnknownDimError, "did you mean 'tp'"),
    (lambda: LAYOUT.order_dims(3), LayoutError, "dims", "3"),
    (lambda: difference("tp=2", LAYOUT), LayoutError, "before", "'tp=2'"),
    (lambda: difference(MANY_DIMS, LAYOUT), LayoutError, "layout 'before' has 13 dims", "12"),
    (
        lambda: difference(LAYOUT, RankLayout(dp=2**25)),
        LayoutError,
        "layout 'after' has 33,554,432 ranks",
    ),
    (
        lambda: megatron_grids(inference={"tensor_parallel": 1}, world_size=8),
        UnknownDimError,
        "'tensor_parallel'",
    ),
    (
        lambda: megatron_grids(tensor_model_parallel=2, world_size=8),
        TypeError,
        "unexpected keyword argument 'tensor_model_parallel'",
    ),
    (
        lambda: megatron_grids(tp=8, ep=4, world_size=16),
        WorldSizeError,
        "expt_tp=8,ep=4,pp=1,dp=-1 needs a multiple of 32 ranks",
        "the world has 16; expt_tp=8 taken from tp",
    ),
]
TEXTS = [
    (lambda: RankLayout(" "), LayoutError, "'' cannot be read"),
    (lambda: RankLayout("tp=2,dp,"), LayoutError, "'' in 'tp=2,dp,'"),
    (lambda: RankLayout("tp8"), LayoutError, "dim 'tp8' is unspecified"),
    (lambda: RankLayout("tp=x"), LayoutError, "'tp=x'"),
    (lambda: RankLayout("tp=2 dp=4"), LayoutError, "comma", "tp=2,dp=4"),
    (lambda: RankLayout("tp=2;dp=4"), LayoutError, "comma", "tp=2,dp=4"),
    (lambda: RankLayout("2,4"), LayoutError, "'2'", "'tp=2,dp=4'"),
    (lambda: RankLayout("tp2,dp4"), LayoutError, "'tp2', 'dp4'"),
    (lambda: RankLayout("t\x1bp=2"), LayoutError, "'t\\x1bp'", "printable"),
    (lambda: RankLayout("tp:8"), LayoutError, "'tp:8'"),
    (lambda: RankLayout("tp=2,tp=2"), LayoutError, "'tp'", "twice"),
    (lambda: RankLayout("tp=2,dp=-1"), LayoutError, "'dp'", "world_size"),
    (lambda: RankLayout("tp,dp=-1", world_size=8), LayoutError, "tp", "dp"),
    (lambda: RankLayout("tp=3,dp=-1", world_size=8), WorldSizeError, "3", "8"),
    (lambda: RankLayout("tp=3,dp=2", world_size=8), WorldSizeError, "6", "8"),
    (lambda: RankLayout("tp=4,dp=4", world_size=8), WorldSizeError, "16 ranks; the world has 8"),
    (
        lambda: read_layout("tp=3,dp", world_size=8),
        WorldSizeError,
        "of 3 ranks, for example 6 or 9; the",
    ),
    (
        lambda: read_layout("tp=4,dp", None, 5, 8),
        WorldSizeError,
        "example 4; 3 are left from rank 5 on",
    ),
    (lambda: read_layout("tp=4", None, 6, 8), WorldSizeError, "from rank 6 needs 10 ranks; the"),
    (
        lambda: RankLayout.fit(8, tp=[2, 4], rank_ofset=4),
        TypeError,
        "'rank_ofset'",
        "'rank_offset'",
    ),
    (lambda: RankLayout.fit(7, tp=[2, 4], dp=[2]), WorldSizeError, " 7 ranks; ", " 4 or 8 ranks"),
]
MAPPINGS = [
    (lambda: RankMapping("dp=2", "tp=2", "xx"), UnknownDimError, "'xx'", "neither"),
    (lambda: RankMapping(FOUR, FOUR, 3), UnknownDimError, "along", "3"),
    (lambda: RankMapping(FOUR, FOUR, batch_axis=True), LayoutError, "batch_axis", "True"),
    (lambda: RankMapping("dp=4", "dp=6"), LayoutError, "along dp into 4 ", " 6 "),
    (lambda: RankMapping(FOUR, FOUR, "db"), UnknownDimError, "along", "'db'", "'tp', 'dp'"),
    (lambda: RankMapping("tp=2", "tp=2"), UnknownDimError, "along", "'dp'", "along=None"),
    (lambda: RankMapping(FOUR, FOUR, shards={"dp": 1}), LayoutError, "along and shards"),
    (lambda: RankMapping(FOUR, FOUR, pipeline="dp"), LayoutError, "along and pipeline"),
    (lambda: RankMapping(FOUR, FOUR, shards=["tp"]), LayoutError, "shards", "'tp'"),
    (lambda: RankMapping(FOUR, FOUR, shards={"tp": 1.5}), LayoutError, "'tp' in shards", "1.5"),
    (lambda: RankMapping(FOUR, FOUR, shards={"tp": "zigzag"}), LayoutError, "'tp'", "'zigzag'"),
    (lambda: HALVES.sends(0)[0].global_slices([5, 3]), LayoutError, "axis 0 ", "5", "4 or 6"),
    (lambda: HALVES.sends(0)[0].source_slices([4, 4]), LayoutError, "axis 1 ", "4", "3 or 6"),
    (lambda: HALVES.sends(0)[0].global_slices([4]), LayoutError, "axis 1, ", "1 axes"),
    (lambda: HALVES.of_shape([4]), LayoutError, "axis 1, ", "1 axes"),
    (lambda: HALVES.of_shape([4, -1]), LayoutError, "shape", "-1"),
    (lambda: RankMapping(FOUR, FOUR, sizes=[((4,), (4,))]), LayoutError, "sizes", "(2, 2)"),
    (
        lambda: RankMapping(FOUR, FOUR, shards={"tp": -2}).of_shape([4, 4]),
        LayoutError,
        "axes 0 and -2",
        "one axis",
    ),
    (lambda: RankMapping("dp=8192", "tp=8192").table(), LayoutError, "67108864", "leaders=True"),
]
GRIDS = [
    (live_topology, NotInitializedError, "call hypercomm.join()"),
    (
        viewed(lambda grid: grid.register_view("x", "ep=3,rest=-1")),
        LayoutError,
        "ep=3,rest=-1 needs ",
        " the grid size is 8",
    ),
    (
        viewed(lambda grid: grid.register_view("x", "ep=8", ["ep"])),
        LayoutError,
        "'ep=8' already names",
    ),
    (lambda: grid([2, -1]), LayoutError, "dim_names"),
    (lambda: grid("tp=2", ["tp"]), LayoutError, "dim_names", "'tp=2'"),
    (lambda: grid("tp=2,dp=-1", None, 5), WorldSizeError, "dp=-1", "3"),
    (lambda: grid([-1, -1], ["tp", "dp"]), LayoutError, "tp", "dp"),
    (lambda: grid([4, 4], ["tp", "dp"]), WorldSizeError, "16", "8"),
    (lambda: grid([4], ["tp"], cover="exact"), WorldSizeError, "cover", "4", "8"),
    (lambda: grid([8], ["tp"], cover="all"), GroupOptionsError, "cover", "'all'", "'exact'"),
    (lambda: grid([8], ["tp"], creation="locl"), GroupOptionsError, "'locl'", "'local'"),
    (lambda: grid([8], ["tp"], backend="bogus"), GroupOptionsError, "'bogus'", "gloo"),
    (lambda: HyperCommGrid([8], ["tp"]), NotInitializedError, "world size", "hypercomm.join()"),
    (lambda: grid("tp=8").create_pg("tp"), NotInitializedError, "initialised", "hypercomm.join()"),
    (lambda: grid("tp=8")["tp"].group, NotInitializedError, "hypercomm.join()"),
    (lambda: renew_world([0]), NotInitializedError, "initialised"),
    (viewed(lambda grid: grid.group_ranks("ep", 0)), UnknownDimError, "'ep'", "'expert'"),
    (viewed(lambda grid: grid["tpp"]), UnknownDimError, "'tpp'", "did you mean 'tp'?"),
    (viewed(pickle.dumps), TypeError, "grid.layout"),
    (viewed(lambda grid: grid.seed(-1)), LayoutError, "base must be at least 0", "-1"),
    (lambda: grid("tp=8", creatoin="local"), TypeError, "'creatoin'", "did you mean 'creation'"),
    (lambda: grid("tp=8", tp="2"), TypeError, "'tp'", "must be an int, not '2'"),
    (lambda: grid(tp=2.0), LayoutError, "size of dim 'tp' must be an int, got 2.0"),
    (lambda: grid(tp=8, shard=2.0), LayoutError, "size of dim 'shard' must be an int, got 2.0"),
    (lambda: grid(tp=8, lazy_int=1), TypeError, "'lazy_int'", "did you mean 'lazy_init'?"),
    (lambda: grid(tp=8, verfy=True), TypeError, "'verfy'", "did you mean 'verify'?"),
    (lambda: grid(tp=8, device_id=None), TypeError, "'device_id'", "must be an int, not None"),
    (lambda: grid("tp=8", mesh_dim_names=["tp"]), TypeError, "mesh_dim_names", "varying dim first"),
    (lambda: GridSet.tile(8, encoder="tp=8")["encodr"], UnknownDimError, "mean 'encoder'?"),
    (lambda: GridSet.tile(8, a="tp=8", requires="tile"), LayoutError, "mean 'tiled'?"),
    (lambda: GridSet.tile(8, a=SWAPPED), LayoutError, "grid 'a'", "not in ascending order"),
    (lambda: GridSet.tile(8, a="tp=2", b="tp=8"), WorldSizeError, "10", "8"),
    (lambda: GridSet.tile(8), LayoutError, "at least one"),
    (lambda: GridSet(["a"], world_size=8), LayoutError, "grids", "['a']"),
    (lambda: GridSet(a="tp=2", b=2, world_size=8), LayoutError, "'b'", "2"),
    (lambda: GridSet({"a": "tp=2"}, nam="x", world_size=8), TypeError, "'nam'", "'name'"),
    *(
        (lambda make=make, more=more: make(8, a="tp=8", **more), TypeError, name, hint)
        for more, name, hint in (
            ({"requres": "tiled"}, "'requres'", "did you mean 'requires'?"),
            ({"verfy": True}, "'verfy'", "did you mean 'verify'?"),
            ({"bakend": "gloo"}, "'bakend'", "did you mean 'backend'?"),
            ({"naem": "x"}, "'naem'", "naem='tp=2,dp=4', not 'x'"),
            ({"wrld": None}, "'wrld'", "did you mean 'world'?"),
        )
        for make in (GridSet.tile, GridSet.colocated, set_of)
    ),
    (lambda: GridSet.tile(a="tp=8", world_size=8), TypeError, "'world_size'", "size first"),
    (
        lambda: set_of(8, a="tp=8").create_pgs("a", "b"),
        TypeError,
        "create_pgs() takes one dict of lists, as in create_pgs({'grid': ['tp', 'dp']})",
        "got 'a', 'b'",
    ),
    (lambda: set_of(8, a="tp=8").create_pgs("a"), LayoutError, "a dict of lists, as in", "got 'a'"),
    (
        lambda: set_of(8, a="tp=8").create_pgs("a", "b"),
        TypeError,
        "create_pgs() takes one dict of lists, as in create_pgs({'grid': ['tp', 'dp']})",
        "got 'a', 'b'",
    ),
    (lambda: set_of(8, a="tp=8").create_pgs("a"), LayoutError, "a dict of lists, as in", "got 'a'"),
    (
        lambda: GridSet.colocated(8, a="tp=8", requires="any"),
        TypeError,
        "only GridSet(...) takes it",
    ),
    (lambda: GridSet.tile(8, a="tp", b="pp"), LayoutError, "tp of a", "pp of b"),
    (lambda: GridSet.tile(8, a="tp=3", b="tp=2,dp"), WorldSizeError, "'b'", " 4 or 6; 5"),
    (lambda: GridSet.tile(8, a="tp=9", b="dp"), WorldSizeError, "no ranks are left"),
    (lambda: GridSet.tile(8, a="tp=4"), WorldSizeError, "'tiled'", "4..7"),
    (lambda: GridSet.tile(8, a="tp=4", b="dp=6"), WorldSizeError, "'b'", "10 ranks", " 8"),
    (lambda: GridSet.colocated(8, a="tp=4", b="tp=8"), WorldSizeError, "'b'", "'a' has 4"),
    (lambda: GridSet.colocated(8, a="tp,dp"), LayoutError, "'a'", "unspecified"),
    (
        lambda: GridSet.tile(8, a="tp=2", b="dp", requires="colocated"),
        WorldSizeError,
        "a has ranks 0..1, b has ranks 2..7",
    ),
    (lambda: GridSet.tile(8, **{"a.b": "tp"}), LayoutError, "'a_b'"),
    (lambda: torchtitan_grids(tp=2, ep=3, world_size=8), WorldSizeError, "ep=3"),
    (lambda: torchtitan_grids(tp=-1, world_size=8), LayoutError, "tp"),
    (
        lambda: torchtitan_grids(ep=3, world_size=8),
        WorldSizeError,
        "ep=3 must divide dp_shard * cp * tp = 8",
        "dp_shard=8 is inferred from 8 ranks",
    ),
    (
        lambda: torchtitan_grids(dp_shard_degree=2, world_size=8),
        TypeError,
        "unexpected keyword argument 'dp_shard_degree'",
    ),
    *(
        (lambda given=given, dp=dp: process_topology(given, dp=dp), LayoutError, words)
        for given, dp, words in (
            (RankLayout([2, 2], ["dp", "pp"], 4), "dp", "rank_offset=4"),
            (RankLayout([2, 2], ["dp", "pp"], strides=[1, 4]), "dp", "strides=(1, 4)"),
            (RankLayout([2, 2], ["dp", "pp"], ranks=[0, 1, 3, 2]), "dp", "ranks=(0, 1, 3, 2)"),
            (RankLayout("dp=2,pp=2,cp=2"), ["dp", "cp"], "'data': ('dp', 'cp')"),
            (RankLayout("dp=2,pp=2,cp=2"), "dp", "'cp' of size 2 has no role"),
        )
    ),
    (lambda: run_ranks(print, 2, args=[threading.Lock()]), TypeError, "cannot pickle"),
    (lambda: run_ranks(print, 1, backend="bogus"), RankFailedError, "bogus"),
    (lambda: run_ranks(threading.Lock, 2), RankFailedError, "cannot pickle"),
    (lambda: fake_world(8, rank=8).__enter__(), LayoutError, "rank", "at most 7", "8"),
    (
        lambda: run_ranks(int, 1, group_timeout=15),
        GroupOptionsError,
        "group_timeout must be a",
        "15",
    ),
    (
        lambda: run_ranks(int, 1, group_timeout=timedelta(0)),
        GroupOptionsError,
        "group_timeout must be longer than 0",
    ),
    (
        lambda: run_ranks(int, 1, timeout=timedelta(seconds=9)),
        GroupOptionsError,
        "timeout must be a number of seconds",
        "seconds=9",
        "write the seconds as a number",
    ),
    (
        lambda: run_ranks(int, 1, timeout=0),
        GroupOptionsError,
        "timeout must be a number of seconds",
        "got 0",
    ),
    (
        lambda: run_ranks(int, 1, timeout="9"),
        GroupOptionsError,
        "timeout must be a number of seconds",
        "'9'",
    ),
    (lambda: run_ranks(int, 1, timeout=math.nan), GroupOptionsError, "timeout", "nan"),
    (lambda: run_ranks(int, 0), LayoutError, "nprocs must be at least 1", "0"),
    *(
        (lambda args=args: run_ranks(int, 1, args=args), LayoutError, text)
        for args, text in (
            (3, "args must be a sequence, as in args=(3,), got 3"),
            ("ab", "args must be a sequence, as in args=('ab',), got 'ab'"),
        )
    ),
    (lambda: report(1), NotInitializedError, "only in a rank that run_ranks"),
]
# The calls get a grid of 8 ranks that has dp groups. They run as rank 5.
CREATED = [
    (lambda grid: grid.create_pg("dp"), GroupExistsError, "'dp'", "get_pg"),
    (lambda grid: grid.get_pg("tp"), GroupMissingError, "'tp'", "create_pg"),
    (lambda grid: grid.get_pg("dp", name="b"), GroupMissingError, "'dp'", "'b'"),
    (lambda grid: grid.create_pg([]), LayoutError, "no dims are given"),
    (lambda grid: grid.create_pg(["tp", "tp"]), LayoutError, "'tp'", "twice"),
    (lambda grid: grid.create_pg("tp", name=""), GroupOptionsError, "''"),
    (
        lambda grid: grid.create_pg("tp", name="a" * 10_000),
        GroupOptionsError,
        "1 to 255 characters",
    ),
    (lambda grid: grid.create_pg("tp", group_desc=3), GroupOptionsError, "3"),
    (lambda grid: grid.create_pg("tp", share="some"), GroupOptionsError, "'some'"),
    (lambda grid: grid.create_pg("tp", backend="x"), GroupOptionsError, "'x'"),
    (lambda grid: grid.create_pg("dpp+cp"), UnknownDimError, "'dpp'", "'dp'"),
    (lambda grid: grid.create_pg("dp,cp"), LayoutError, "'dp,cp'", "dp+cp"),
    (lambda grid: grid.create_pg("tp", timeout=30), GroupOptionsError, "30"),
    (
        lambda grid: grid.create_pg("tp", timeout=timedelta(0)),
        GroupOptionsError,
        "timeout",
        "0:00:00",
    ),
    (
        lambda grid: grid.create_pg("tp", backend="gloo", pg_options=7),
        GroupOptionsError,
        "pg_options",
        "7",
        "passes no options",
    ),
    (after_destroy, GridDestroyedError, "tp=2,cp=2,dp=2", "destroyed"),
    (lambda grid: grid.reshape("tp=2,dp=3", ranks=range(7)), WorldSizeError, "6", "7"),
    (lambda grid: grid.reshape("dp=-1", ranks=[0, 1, 1]), LayoutError, "ranks", "(0, 1, 1)"),
    (lambda grid: grid.reshape("dp=-1", ranks=[0, 8]), LayoutError, "ranks", "8"),
    *(
        (lambda grid, wrong=wrong: grid.watch(wrong), ToolError, "seconds", text)
        for wrong, text in (
            (timedelta(seconds=9), "seconds=9"),
            ("9", "'9'"),
            (0, "got 0"),
            (math.nan, "nan"),
            (1e7, "at most 1e6"),
        )
    ),
    (lambda grid: grid.survivors(None), GroupOptionsError, "timeout", "None"),
    (lambda grid: grid.connect(pipelines=["stage"]), UnknownDimError, "'stage'", "cp"),
    (lambda _: renew_world([0, 8]), LayoutError, "ranks", "8"),
    (lambda grid: grid.create_pg("cp", derive=len), GroupOptionsError, "name"),
    (
        lambda grid: grid.create_pg("cp", name="x", derive=lambda _: [0]),
        LayoutError,
        "derive",
        "RankGroups",
    ),
    *(
        (
            lambda grid, lists=lists: grid.create_pg("cp", name="x", derive=lists),
            LayoutError,
            "derive",
            *words,
        )
        for lists, words in (
            ([], ["empty"]),
            ([[0, 1], []], ["groups[1]", "empty"]),
            ([[0, 1, 0]], ["rank 0 is listed twice in groups[0]"]),
            ([[0, 1], [2, 8]], ["rank 8", "not a rank of the grid"]),
            ([[0, 1], [2, -1]], ["groups[1]", "-1"]),
            ([[0, 1], [2, 1.5]], ["groups[1]", "1.5"]),
            ([[0, 4], [1, 4]], ["rank 4 is in two groups, (0, 4) and (1, 4)", "create_pgs(["]),
            ("0,1", ["'0,1'"]),
            (RankGroups([[0, 9]]), ["rank 9"]),
        )
    ),
    (
        lambda grid: grid.ensure_pg("tp", timout=3),
        TypeError,
        "unexpected keyword argument 'timout'",
    ),
    *(
        (lambda grid, wrong=wrong: grid.create_pgs(wrong), LayoutError, "a list of requests", text)
        for wrong, text in (
            ("tp", "got 'tp'; write ['tp']"),
            ({"dims": "tp"}, "write [{'dims': 'tp'}]"),
            (GroupRequest("tp", name="x"), "write [GroupRequest('tp', name='x')]"),
        )
    ),
    (
        lambda grid: grid.create_pgs("tp", "cp"),
        TypeError,
        "create_pgs() takes one list, as in create_pgs(['tp', 'dp']), got 'tp', 'cp'",
    ),
    (lambda grid: grid.create_pgs({"tp"}), LayoutError, "a set has no order"),
    (lambda grid: grid.create_pgs(["cp", "xp"]), UnknownDimError, "xp"),
    (lambda grid: grid.create_pgs(["cp", {"dim": "tp"}]), GroupOptionsError, "dims"),
    (lambda grid: grid.create_pgs(["cp", "dp"]), GroupExistsError, "'dp'"),
    (lambda grid: grid.create_pgs(["cp", "tp", ["cp"]]), GroupExistsError, "0 and 2"),
    (lambda grid: grid.create_pgs([{"dims": "tp", "nam": 1}]), TypeError, "did you mean 'name'?"),
    *(
        (lambda grid, call=call, text=text: call(grid)("cp", backend=text), GroupOptionsError, text)
        for text in (" gloo", "cpu: gloo", "cuda:0:nccl", "cpu:gloo,", "cpu:gloo,cpu:gloo")
        for call in (lambda grid: grid.create_pg, lambda grid: grid.explain)
    ),
    (lambda grid: grid.device_mesh("pp"), UnknownDimError, "unknown dim 'pp'"),
    (lambda grid: grid.device_mesh("tp", "tp"), LayoutError, "tp"),
    (lambda grid: grid.device_mesh(("dp", "tp"), "dp"), LayoutError, "dp"),
    (lambda grid: grid.device_mesh(("tp", "dp")), LayoutError, "write ('dp', 'tp')"),
    (
        lambda grid: grid.device_mesh(("cp", "dp"), "tp"),
        LayoutError,
        "the ranks of a mesh dim over ('cp', 'dp') would have 'dp' as the fastest dim",
    ),
    (lambda grid: grid.device_mesh(3), LayoutError, "3"),
    (lambda grid: grid.device_mesh(()), LayoutError, "dim"),
    *(
        (lambda grid, to=to: grid.device_mesh(flatten=to), LayoutError, value)
        for to, value in (
            ({"dp": ["cp"]}, "'dp'"),
            ({"all": ["dp", "cpp"]}, "'cpp'"),
            ({"all": 5}, "5"),
            ({"all": []}, "()"),
            ({"all": ["cp", "dp"]}, "('dp', 'cp', 'tp')"),
            ({"all": ["dp", "tp"]}, "('dp', 'cp', 'tp')"),
        )
    ),
    *(
        (lambda _, more=more: reconfigured(**more).create_pg("tp"), GroupOptionsError, words)
        for more, words in (
            ({"lazy_init": True}, "lazy_init=True"),
            ({"creation": "enumerate"}, "creation='enumerate'"),
        )
    ),
    (lambda grid: Mpu(grid, dp=7), LayoutError, "7"),
    (lambda grid: Mpu(grid, tp=["tp", 3]), LayoutError, "3"),
    (lambda grid: Mpu(grid, sp=["cp", "dp"]), LayoutError, "'dp'"),
    (Mpu, LayoutError, "'cp'"),
]
TOOLS = [
    (lambda: draw(LAYOUT, groups="ep"), UnknownDimError, "'ep'"),
    (lambda: draw(MAPPING, groups="dp"), LayoutError, "groups"),
    (lambda: draw(difference(LAYOUT, LAYOUT), groups="tp"), LayoutError, "groups"),
    (lambda: draw({}), LayoutError, "at least one dim"),
    (lambda: draw(3), LayoutError, "3"),
    (lambda: draw(LAYOUT, on=read_topology(2, 2)), LayoutError, "2 GPUs"),
    (lambda: draw(RankLayout("tp=2", None, 2**30), on=8), LayoutError, "ranks of a picture"),
    (lambda: draw(RankLayout([2**25], ["tp"])), LayoutError, "33554432"),
    (
        lambda: place(RankLayout([2], ["tp"], 3), [{"a": "s"}, 4]),
        LayoutError,
        "5 ranks need more than 4",
    ),
    (lambda: place("tp=4,dp", on=["a,b,c", 2]), WorldSizeError, "4", "6"),
    (lambda: place(3, on=8), LayoutError, "3"),
    (lambda: place("tp=2", on=8, traffic={"tp": math.nan}), LayoutError, "nan"),
    (lambda: place("tp=2", on=8, traffic="tp=1,tp=2"), LayoutError, "'tp=2'"),
    (lambda: place("tp=2", on=8, traffic="cp=2"), UnknownDimError, "'cp'"),
    (lambda: place("tp=2", on=8).find("tp", "leaf"), LayoutError, "'leaf'"),
    (lambda: place("tp=2,dp=2", on=8).find("tp+dp", "host"), LayoutError, "tp+dp"),
    (lambda: Traffic(1, "star"), LayoutError, "'star'"),
    (lambda: Level("host", [0, 1], "a"), LayoutError, "'host'", "name"),
    (lambda: Topology([]), LayoutError, "levels"),
    (lambda: Topology([Level.of("a", "xy")] * 2), LayoutError, "'a'"),
    (lambda: read_topology(2, 4).level("hots"), LayoutError, "'hots'"),
    (lambda: grad_norm([1]), GroupOptionsError, "parameters= must map dims to parameters"),
    (lambda: grad_norm({"tp": []}), GroupOptionsError, "got 'tp'"),
    (lambda: grad_norm({None: []}, 0), GroupOptionsError, "norm_type", "got 0"),
    (lambda: clip_grad_norm_({None: []}, -1), GroupOptionsError, "max_norm", "got -1"),
]
COMPAT = [
    *(
        (lambda call=call: call(tensor_model_parallel_sizes=2), TypeError, "_parallel_sizes'")
        for call in (
            parallel_state.initialize_model_parallel,
            ParallelState.create,
            TensorParallelState.create,
        )
    ),
    (
        lambda: ParallelState.create(2, tensor_model_parallel_size=2),
        TypeError,
        "multiple values for argument 'tensor_model_parallel_size'",
    ),
]


# Each mistake raises exactly its class, with all parts in the message.
@pytest.mark.parametrize(
    ("call", "kind", "parts"),
    [
        *(
            (call, kind, parts)
            for call, kind, *parts in LAYOUTS + TEXTS + MAPPINGS + GRIDS + TOOLS + COMPAT
        ),
        *((created(call), kind, parts) for call, kind, *parts in CREATED),
    ],
)
def test_mistake(call, kind, parts, monkeypatch):
    for variable in ("WORLD_SIZE", "RANK", "HYPERCOMM_LAYOUT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert [part for part in parts if part not in str(caught.value)] == []


# Legacy code catches builtin types. Therefore errors of layouts are ValueErrors, and errors of
# groups are KeyErrors.
def test_builtin_bases():
    assert issubclass(LayoutError, ValueError)
    assert issubclass(RankOutsideError, ValueError)
    assert issubclass(WorldSizeError, ValueError)
    assert issubclass(GroupExistsError, KeyError)
    assert issubclass(GroupMissingError, KeyError)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), HyperCommError)
    assert str(GroupMissingError("a sentence")) == "a sentence"  # KeyError's str() is a repr
