"""Mistakes that people make: each raises its class and names the argument and the value."""

import math
import pickle
from datetime import timedelta

import pytest
from group_facts import tables

from hypercomm import (
    GridSet,
    HyperCommGrid,
    RankLayout,
    RankMapping,
    draw,
    errors,
    megatron_grids,
    place,
    read_topology,
    renew_world,
    run_ranks,
)
from hypercomm.launch import report
from hypercomm.layout.difference import difference
from hypercomm.testing import fake_world, simulate
from hypercomm.tools.place import Level, Topology, Traffic
from hypercomm.training import clip_grad_norm_, grad_norm

LAYOUT = RankLayout([2, 2, 2], ["tp", "cp", "dp"])
DP = LAYOUT.groups("dp")
MAPPING = RankMapping("dp=2", "dp=4")
SWAPPED = RankLayout([2], ["tp"], ranks=[1, 0])


def grid(*arguments, **options):
    return HyperCommGrid(*arguments, **{"world_size": 8, **options})


def created(call):
    """Call with a grid of 8 ranks, seen from rank 5, whose dp groups exist: nothing changes."""

    def called():
        with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
            grid.create_pg("dp")
            before, groups = tables(), dict(grid.pgs)
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


# (the call, its error, what the message must hold: the argument, the value, what would have worked)
LAYOUTS = [
    (lambda: RankLayout([2, 4], ["tp"]), errors.LayoutError, "shape", "dim_names", "['tp']"),
    (lambda: RankLayout([], []), errors.LayoutError, "at least one dim"),
    (lambda: RankLayout([2, 0], ["tp", "dp"]), errors.LayoutError, "'dp'", "at least 1", "0"),
    (lambda: RankLayout([2, -4], ["tp", "dp"]), errors.LayoutError, "'dp'", "-4"),
    (lambda: RankLayout([2, 4.0], ["tp", "dp"]), errors.LayoutError, "'dp'", "int", "4.0"),
    (lambda: RankLayout([2], "tp"), errors.LayoutError, "dim_names", "sequence", "'tp'"),
    (lambda: RankLayout([2], {"tp"}), errors.LayoutError, "dim_names", "order"),
    (lambda: RankLayout([2, 4], ["tp", "tp"]), errors.LayoutError, "dim_names", "'tp'"),
    (lambda: RankLayout([2, 4], ["tp", ""]), errors.LayoutError, "dim name", "''"),
    (lambda: RankLayout([2], ["tp-cp"]), errors.LayoutError, "dim name", "'tp-cp'"),
    (lambda: RankLayout([2], ["t\x1bp"]), errors.LayoutError, "dim name", "printable"),
    (lambda: RankLayout([2], ["t\0p"]), errors.LayoutError, "dim name", "printable"),
    (lambda: RankLayout([2], ["tp"], -1), errors.LayoutError, "rank_offset", "-1"),
    (lambda: RankLayout([2], ["tp"], 1.5), errors.LayoutError, "rank_offset", "1.5"),
    (lambda: RankLayout(tp=2, rank_ofset=3), TypeError, "'rank_ofset'", "'rank_offset'"),
    (lambda: HyperCommGrid(tp=2, worldsize=8), TypeError, "'worldsize'", "'world_size'"),
    (lambda: LAYOUT.groups("pp"), errors.UnknownDimError, "'pp'", "('tp', 'cp', 'dp')"),
    (lambda: LAYOUT.groups("tp", "tp"), errors.LayoutError, "'tp'", "twice"),
    (LAYOUT.groups, errors.LayoutError, "dims is empty", "('tp', 'cp', 'dp')"),
    (lambda: LAYOUT.coords(8), errors.RankOutsideError, "rank 8", "tp=2,cp=2,dp=2", "0..7"),
    (lambda: LAYOUT.coords(1.0), errors.RankOutsideError, "rank", "1.0"),
    (lambda: DP.of(8), errors.RankOutsideError, "rank 8"),
    (lambda: DP[4], IndexError, "4"),
    (lambda: DP.chunks(3), errors.LayoutError, "3", "2 members"),
    (lambda: LAYOUT.rank(tp=1), errors.LayoutError, "['cp', 'dp']"),
    (lambda: LAYOUT.rank(tp=2, cp=0, dp=0), errors.LayoutError, "'tp'", "range(2)", "2"),
    (lambda: LAYOUT.split("dp", a=3, b=1), errors.LayoutError, "'dp'", "a=3"),
    (lambda: RankLayout.from_json("{}"), errors.LayoutError, "sizes are missing"),
    (lambda: RankMapping("dp=2", "tp=2", "xx"), errors.UnknownDimError, "'xx'", "neither"),
    (lambda: megatron_grids(tensor_model_parallel_size=2), TypeError, "tensor_model"),
]
TEXTS = [
    (lambda: RankLayout.parse("tp=2,,dp"), errors.LayoutError, "'tp=2,,dp'"),
    (lambda: RankLayout.parse("tp=x"), errors.LayoutError, "'tp=x'"),
    (lambda: RankLayout.parse("tp=2 dp=4"), errors.LayoutError, "comma", "tp=2,dp=4"),
    (lambda: RankLayout.parse("tp=2;dp=4"), errors.LayoutError, "comma", "tp=2,dp=4"),
    (lambda: RankLayout.parse("tp=2|dp=4"), errors.LayoutError, "comma", "tp=2,dp=4"),
    (lambda: RankLayout.parse("2,4"), errors.LayoutError, "'2'", "dim name"),
    (lambda: RankLayout.parse("tp2,dp4"), errors.LayoutError, "tp=2,dp=4"),
    (lambda: RankLayout.parse("tp2dp4"), errors.LayoutError, "tp=2,dp=4"),
    (lambda: RankLayout.parse("t\x1bp=2"), errors.LayoutError, "'t\\x1bp'", "printable"),
    (lambda: RankLayout.parse("tp:8"), errors.LayoutError, "'tp:8'"),
    (lambda: RankLayout.parse("tp=2,tp=2"), errors.LayoutError, "'tp'", "twice"),
    (lambda: RankLayout.parse("tp=2,dp=-1"), errors.LayoutError, "'dp'", "world_size"),
    (lambda: RankLayout.parse("tp,dp=-1", world_size=8), errors.LayoutError, "tp", "dp"),
    (lambda: RankLayout.parse("tp=3,dp=-1", world_size=8), errors.WorldSizeError, "3", "8"),
    (lambda: RankLayout.parse("tp=3,dp=2", world_size=8), errors.WorldSizeError, "6", "8"),
]
GRIDS = [
    (lambda: grid([2, -1]), errors.LayoutError, "dim_names"),
    (lambda: grid("tp=2", ["tp"]), errors.LayoutError, "dim_names", "'tp=2'"),
    (lambda: grid("tp=2,dp=-1", None, 5), errors.WorldSizeError, "dp=-1", "3"),
    (lambda: grid([-1, -1], ["tp", "dp"]), errors.LayoutError, "tp", "dp"),
    (lambda: grid([4, 4], ["tp", "dp"]), errors.WorldSizeError, "16", "8"),
    (lambda: grid([4], ["tp"], 5), errors.WorldSizeError, "5", "8"),
    (lambda: grid([4], ["tp"], cover="exact"), errors.WorldSizeError, "cover", "4", "8"),
    (lambda: grid([8], ["tp"], cover="all"), errors.GroupOptionsError, "cover", "'all'", "'exact'"),
    (lambda: grid([8], ["tp"], creation="locl"), errors.GroupOptionsError, "'locl'", "'local'"),
    (lambda: grid([8], ["tp"], backend="bogus"), errors.GroupOptionsError, "'bogus'", "gloo"),
    (lambda: grid([8], ["tp"], world_size=0), errors.LayoutError, "world_size", "0"),
    (lambda: HyperCommGrid([8], ["tp"]), errors.NotInitializedError, "world size"),
    (lambda: grid([8], ["tp"]).create_pg("tp"), errors.NotInitializedError, "initialised"),
    (lambda: grid([8], ["tp"], share_with=3), errors.GroupOptionsError, "share_with", "3"),
    (lambda: renew_world([0]), errors.NotInitializedError, "initialised"),
    (viewed(lambda grid: grid.group_ranks("ep", 0)), errors.UnknownDimError, "'ep'", "'expert'"),
    (viewed(lambda grid: grid["tpp"]), errors.UnknownDimError, "'tpp'", "did you mean 'tp'?"),
    (viewed(pickle.dumps), TypeError, "grid.layout"),
    (created(lambda grid: grid.create_pg("dp")), errors.GroupExistsError, "'dp'", "get_pg"),
    (created(lambda grid: grid.get_pg("tp")), errors.GroupMissingError, "'tp'", "create_pg"),
    (created(lambda grid: grid.get_pg("dp", name="b")), errors.GroupMissingError, "'dp'", "'b'"),
    (created(lambda grid: grid.create_pg([])), errors.LayoutError, "dims is empty"),
    (created(lambda grid: grid.create_pg(["tp", "tp"])), errors.LayoutError, "'tp'", "twice"),
    (created(lambda grid: grid.create_pg("tp", name="")), errors.GroupOptionsError, "''"),
    (created(lambda grid: grid.create_pg("tp", group_desc=3)), errors.GroupOptionsError, "3"),
    (created(lambda grid: grid.create_pg("tp", share="some")), errors.GroupOptionsError, "'some'"),
    (created(lambda grid: grid.create_pg("tp", backend="x")), errors.GroupOptionsError, "'x'"),
    (created(lambda grid: grid.create_pg("dpp+cp")), errors.UnknownDimError, "'dpp'", "'dp'"),
    (created(lambda grid: grid.create_pg("dp,cp")), errors.LayoutError, "'dp,cp'", "dp+cp"),
    (created(lambda grid: grid.create_pg("tp", timeout=30)), errors.GroupOptionsError, "30"),
    (
        created(lambda grid: grid.create_pg("tp", timeout=timedelta(0))),
        errors.GroupOptionsError,
        "timeout",
        "0:00:00",
    ),
    (
        created(lambda grid: grid.create_pg("tp", backend="gloo", pg_options=7)),
        errors.GroupOptionsError,
        "pg_options",
        "7",
    ),
    (created(after_destroy), errors.GridDestroyedError, "tp=2,cp=2,dp=2", "destroyed"),
    (
        created(lambda grid: grid.reshape("tp=2,dp=3", ranks=range(7))),
        errors.WorldSizeError,
        "6",
        "7",
    ),
    (
        created(lambda grid: grid.reshape("dp=-1", ranks=[0, 1, 1])),
        errors.LayoutError,
        "ranks",
        "(0, 1, 1)",
    ),
    (created(lambda grid: grid.reshape("dp=-1", ranks=[0, 8])), errors.LayoutError, "ranks", "8"),
    (created(lambda grid: grid.reshape("tp=8", timeout=3)), errors.GroupOptionsError, "timeout"),
    (created(lambda grid: grid.survivors(None)), errors.GroupOptionsError, "timeout", "None"),
    (created(lambda grid: grid.connect(timeout=5)), errors.GroupOptionsError, "timeout", "5"),
    (
        created(lambda grid: grid.connect(pipelines=["stage"])),
        errors.UnknownDimError,
        "'stage'",
        "cp",
    ),
    (created(lambda _: renew_world([0, 8])), errors.LayoutError, "ranks", "8"),
    (created(lambda _: renew_world([0], timeout=3)), errors.GroupOptionsError, "timeout", "3"),
    (created(lambda grid: grid.create_pg("cp", derive=len)), errors.GroupOptionsError, "name"),
    (
        created(lambda grid: grid.create_pg("cp", name="x", derive=3)),
        errors.GroupOptionsError,
        "derive",
        "3",
    ),
    (
        created(lambda grid: grid.create_pg("cp", name="x", derive=lambda _: [0])),
        errors.GroupOptionsError,
        "derive",
        "RankGroups",
    ),
    (created(lambda grid: grid.ensure_pg("tp", timout=3)), TypeError, "did you mean 'timeout'?"),
    (created(lambda grid: grid.create_pgs("tp")), errors.LayoutError, "'tp'"),
    (created(lambda grid: grid.create_pgs({"tp"})), errors.LayoutError, "a set has no order"),
    (created(lambda grid: grid.create_pgs(["cp", "xp"])), errors.UnknownDimError, "xp"),
    (
        created(lambda grid: grid.create_pgs(["cp", {"dim": "tp"}])),
        errors.GroupOptionsError,
        "dims",
    ),
    (created(lambda grid: grid.create_pgs(["cp", "dp"])), errors.GroupExistsError, "'dp'"),
    (
        created(lambda grid: grid.create_pgs(["cp", "tp", ["cp"]])),
        errors.GroupExistsError,
        "0 and 2",
    ),
    (
        created(lambda grid: grid.create_pgs([{"dims": "tp", "nam": 1}])),
        TypeError,
        "did you mean 'name'?",
    ),
    *(
        (created(lambda grid, call=call, text=text: call(grid)("cp", backend=text)), kind, text)
        for kind in [errors.GroupOptionsError]
        for text in (" gloo", "cpu: gloo", "cuda:0:nccl", "cpu:gloo,", "cpu:gloo,cpu:gloo")
        for call in (lambda grid: grid.create_pg, lambda grid: grid.explain)
    ),
    (viewed(lambda grid: grid.seed(-1)), errors.LayoutError, "base must be at least 0", "-1"),
    (lambda: grid("tp=8", creatoin="local"), TypeError, "'creatoin'", "did you mean 'creation'"),
    (lambda: grid("tp=8", tp="2"), TypeError, "'tp'"),
    (lambda: grid("tp=8", mesh_dim_names=["tp"]), TypeError, "mesh_dim_names", "fastest dim first"),
    (lambda: GridSet.tile(8, encoder="tp=8")["encodr"], errors.UnknownDimError, "mean 'encoder'?"),
    (lambda: GridSet.tile(8, a="tp=8", requires="tile"), errors.LayoutError, "mean 'tiled'?"),
    (lambda: GridSet.tile(8, a=SWAPPED), errors.LayoutError, "grid 'a'", "in their own order"),
    (lambda: GridSet.tile(8, a="tp=2", b="tp=8"), errors.WorldSizeError, "10", "8"),
    (lambda: fake_world(8, rank=8).__enter__(), errors.LayoutError, "rank", "range(8)", "8"),
    (lambda: simulate(int, 2, args=7), errors.LaunchError, "args", "7"),
    (lambda: run_ranks(int, 4097), errors.LaunchError, "nprocs", "4097"),
    (lambda: run_ranks(int, 0), errors.LayoutError, "nprocs must be at least 1", "0"),
    (lambda: run_ranks(int, 2.0), errors.LayoutError, "nprocs must be an int", "2.0"),
    (lambda: report(1), errors.NotInitializedError, "only in a rank that run_ranks"),
]
TOOLS = [
    (lambda: draw(LAYOUT, groups="ep"), errors.UnknownDimError, "'ep'"),
    (lambda: draw(MAPPING, groups="dp"), errors.LayoutError, "groups"),
    (lambda: draw(difference(LAYOUT, LAYOUT), groups="tp"), errors.LayoutError, "groups"),
    (lambda: draw({}), errors.LayoutError, "at least one dim"),
    (lambda: draw(3), errors.LayoutError, "3"),
    (lambda: draw(LAYOUT, on=read_topology(2, 2)), errors.LayoutError, "2 GPUs"),
    (lambda: draw(RankLayout("tp=2", None, 2**30), on=8), errors.LayoutError, "ranks of a picture"),
    (lambda: draw(RankLayout([2**25], ["tp"])), errors.LayoutError, "33554432"),
    (
        lambda: place(RankLayout([2], ["tp"], 3), {"a": "s"}, gpus_per_host=4),
        errors.LayoutError,
        "5 ranks need more than 4",
    ),
    (lambda: place("tp=4,dp", on="a,b,c", gpus_per_host=2), errors.WorldSizeError, "4", "6"),
    (lambda: place(3, on=8), errors.LayoutError, "3"),
    (lambda: place("tp=2", on=8, traffic={"tp": math.nan}), errors.LayoutError, "nan"),
    (lambda: place("tp=2", on=8, traffic="tp=1,tp=2"), errors.LayoutError, "'tp=2'"),
    (lambda: place("tp=2", on=8, traffic="cp=2"), errors.UnknownDimError, "'cp'"),
    (lambda: place("tp=2", on=8).find("tp", "leaf"), errors.LayoutError, "'leaf'"),
    (lambda: place("tp=2,dp=2", on=8).find("tp+dp", "host"), errors.LayoutError, "tp+dp"),
    (lambda: place("tp=2", on="domain=8").rankfile(), errors.LayoutError, "host"),
    (lambda: Traffic(1, "star"), errors.LayoutError, "'star'"),
    (lambda: Level("host", [0, 1], "a"), errors.LayoutError, "'host'", "name"),
    (lambda: Topology([]), errors.LayoutError, "levels"),
    (lambda: Topology([Level.of("a", "xy")] * 2), errors.LayoutError, "'a'"),
    (lambda: read_topology(2, 4).level("hots"), errors.LayoutError, "'hots'"),
    (lambda: grad_norm([1]), errors.GroupOptionsError, "parameters must map dims to parameters"),
    (lambda: grad_norm({"tp": []}), errors.GroupOptionsError, "got 'tp'"),
    (lambda: grad_norm({None: []}, 0), errors.GroupOptionsError, "norm_type", "got 0"),
    (lambda: clip_grad_norm_({None: []}, -1), errors.GroupOptionsError, "max_norm", "got -1"),
]


# Each mistake raises exactly its class, with a message that names what is wrong.
@pytest.mark.parametrize(
    ("call", "kind", "parts"), [(a, b, c) for a, b, *c in LAYOUTS + TEXTS + GRIDS + TOOLS]
)
def test_mistake(call, kind, parts, monkeypatch):
    for variable in ("WORLD_SIZE", "RANK", "HYPERCOMM_LAYOUT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert [part for part in parts if part not in str(caught.value)] == []


# A fake world is not started in a world that exists.
def test_fake_world_in_a_world():
    with fake_world(8), pytest.raises(errors.WorldSizeError, match="8"), fake_world(4):
        pass


# Legacy code catches builtins: a layout's errors are ValueErrors, a group's are KeyErrors.
def test_family():
    assert issubclass(errors.LayoutError, ValueError)
    assert issubclass(errors.RankOutsideError, ValueError)
    assert issubclass(errors.WorldSizeError, ValueError)
    assert issubclass(errors.GroupExistsError, KeyError)
    assert issubclass(errors.GroupMissingError, KeyError)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.HyperCommError)
    assert str(errors.GroupMissingError("a sentence")) == "a sentence"  # not its repr
