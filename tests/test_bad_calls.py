"""The table of bad calls, and the exact sentence that each one gets."""

import pickle
import re
from datetime import timedelta

import pytest

from hypercomm import (
    GridSet,
    HyperCommGrid,
    RankLayout,
    RankMapping,
    errors,
    megatron_grids,
    renew_world,
)
from hypercomm.compat.megatron.parallel_state import create_hybrid_dp_cp_groups
from hypercomm.layout import parsing as notation
from hypercomm.layout.placing import place
from hypercomm.process_groups import c10d
from hypercomm.testing import fake_world, local_ranks, run_ranks, simulate
from hypercomm.topology import read_topology

LAYOUT = RankLayout([2, 2, 2], ["tp", "cp", "dp"])
DP = LAYOUT.groups("dp")


def grid(*arguments, **options):
    return HyperCommGrid(*arguments, **{"world_size": 8, **options})


def in_a_world(call):
    """Make a call with a grid of 8 ranks, seen from rank 5, in which dp exists."""

    def called():
        with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
            grid.create_pg("dp")
            call(grid)

    return called


def in_a_view(call):
    """Make a call with a grid of 8 ranks that has a view "expert"."""

    def called():
        grid = HyperCommGrid([2, 4], ["tp", "dp"], world_size=8)
        grid.register_view("expert", [4, 2], ["ep", "edp"])
        call(grid)

    return called


def after_destroy(grid):
    grid.destroy()
    grid.create_pg("tp")


# (the call, the builtin that legacy code catches, the class of ours, the sentence)
LAYOUT_CALLS = [
    (
        lambda: RankMapping.weights("tp=2,pp=2", "tp=4", {"tp": 0}, at=1),
        ValueError,
        errors.LayoutError,
        "at must be a mapping such as {'pp': 1}, got 1",
    ),
    (
        lambda: RankMapping.weights("pp=2", "tp=4", at={"pp": 1}),
        ValueError,
        errors.LayoutError,
        "select() of every dim leaves none; the rank there is 1",
    ),
    (
        lambda: megatron_grids(tensor_model_parallel_size=2),
        TypeError,
        TypeError,
        (
            "megatron_grids() got an unexpected keyword argument 'tensor_model_parallel_size'; "
            "here it is called tp="
        ),
    ),
    (
        lambda: RankLayout([2, 4], ["tp"]),
        ValueError,
        errors.LayoutError,
        "len(shape) [2, 4] != len(dim_names) ['tp']: 2 and 1; give one size for each name",
    ),
    (
        lambda: RankLayout([], []),
        ValueError,
        errors.LayoutError,
        "a layout needs at least one dim, but shape and dim_names are empty",
    ),
    (
        lambda: RankLayout(8, ["tp"]),
        ValueError,
        errors.LayoutError,
        "shape must be a sequence, got 8",
    ),
    (
        lambda: RankLayout([2], "tp"),
        ValueError,
        errors.LayoutError,
        "dim_names must be a sequence, got 'tp'",
    ),
    (
        lambda: RankLayout([2], {"tp"}),
        ValueError,
        errors.LayoutError,
        "dim_names must be a sequence, and a set has no order: {'tp'}",
    ),
    (
        lambda: RankLayout([2, 4], ["tp", "tp"]),
        ValueError,
        errors.LayoutError,
        "duplicate dim_names: 'tp' comes twice in ('tp', 'tp')",
    ),
    (
        lambda: RankLayout([2, 4], ["tp", ""]),
        ValueError,
        errors.LayoutError,
        "every dim name must be a non-empty string, got '' in ('tp', '')",
    ),
    (
        lambda: RankLayout([2, 4], ["tp", 7]),
        ValueError,
        errors.LayoutError,
        "every dim name must be a non-empty string, got 7 in ('tp', 7)",
    ),
    (
        lambda: RankLayout([2], ["tp"], -1),
        ValueError,
        errors.LayoutError,
        "rank_offset must be non-negative, got -1",
    ),
    (
        lambda: RankLayout([2], ["tp"], 1.5),
        ValueError,
        errors.LayoutError,
        "rank_offset must be an int, got 1.5",
    ),
    (
        lambda: RankLayout([2, 2], ["tp", "dp"], strides=[1, 1]),
        ValueError,
        errors.LayoutError,
        "the stride of dim 'dp' must be at least 2, the extent of the dims before it, got 1",
    ),
    (
        lambda: LAYOUT.groups("pp"),
        ValueError,
        errors.UnknownDimError,
        "unknown dim 'pp'; this layout has dims ('tp', 'cp', 'dp')",
    ),
    (
        lambda: LAYOUT.groups("tp", "tp"),
        ValueError,
        errors.LayoutError,
        "dim 'tp' comes twice in dims ('tp', 'tp')",
    ),
    (
        LAYOUT.groups,
        ValueError,
        errors.LayoutError,
        "dims is empty; name at least one of ('tp', 'cp', 'dp')",
    ),
    (
        lambda: LAYOUT.coords(8),
        ValueError,
        errors.RankOutsideError,
        "rank 8 is not in layout tp=2,cp=2,dp=2, which holds ranks 0..7",
    ),
    (
        lambda: LAYOUT.select(cp=1).coords(4),
        ValueError,
        errors.RankOutsideError,
        "rank 4 is not in layout tp=2,dp=2, which holds ranks 2..7, with gaps (strides (1, 4))",
    ),
    (
        lambda: LAYOUT.coords(1.0),
        ValueError,
        errors.RankOutsideError,
        "a rank is an int, got 1.0",
    ),
    (
        lambda: DP.of(8),
        ValueError,
        errors.RankOutsideError,
        "rank 8 is in none of these groups: <4 groups of 2: (0, 4), (1, 5), ...>",
    ),
    (
        lambda: LAYOUT.rank(tp=1),
        ValueError,
        errors.LayoutError,
        "rank() needs a coordinate for every dim; ['cp', 'dp'] have none",
    ),
    (
        lambda: LAYOUT.rank(tp=2, cp=0, dp=0),
        ValueError,
        errors.LayoutError,
        "the coordinate of dim 'tp' must be in range(2), got 2",
    ),
    (
        lambda: LAYOUT.merge(["tp", "dp"], "x"),
        ValueError,
        errors.LayoutError,
        (
            "dims ('tp', 'dp') cannot be merged: they are not neighbours in ('tp', 'cp', 'dp'); "
            "reorder() the layout first, which renumbers its ranks"
        ),
    ),
    (
        lambda: RankLayout([2**13, 2**12], ["tp", "dp"], strides=[1, 2**14]).reorder("dp", "tp"),
        ValueError,
        errors.LayoutError,
        (
            "with gaps (strides (1, 16384)) the ranks must be listed, and 33554432 are more than "
            "the 16777216 that can be; take a layout without gaps"
        ),
    ),
    (
        lambda: DP.chunks(3),
        ValueError,
        errors.LayoutError,
        "chunk size 3 does not divide the group size 2; use one of [1, 2]",
    ),
    (
        lambda: DP.levels([2, 2]),
        ValueError,
        errors.LayoutError,
        "level sizes 2 * 2 = 4, but each group has 2 members",
    ),
    (
        lambda: DP.pick(lambda group: group[: 1 + group[0] % 2])[1],
        ValueError,
        errors.LayoutError,
        (
            "pick() must keep equally many ranks of every group, but it keeps 1 of group 0 and 2 "
            "of group 1"
        ),
    ),
    (
        lambda: DP[4],
        IndexError,
        IndexError,
        "group 4 is out of range; there are 4 groups",
    ),
    (
        lambda: RankLayout.from_json("{}"),
        ValueError,
        errors.LayoutError,
        (
            "the JSON form of a layout is an object with 'shape', 'dim_names' and perhaps "
            "'rank_offset' and 'strides', or 'ranks', got '{}'"
        ),
    ),
    (
        lambda: LAYOUT.coords(10**5000),
        ValueError,
        errors.RankOutsideError,
        "rank <int too long to show> is not in layout tp=2,cp=2,dp=2, which holds ranks 0..7",
    ),
    (
        lambda: read_topology("8,36", 72),
        ValueError,
        errors.TopologyError,
        ("in '8,36' a domain of 36 GPUs does not hold several whole hosts of 8; 32 or 40 would do"),
    ),
    (
        lambda: read_topology("n[1-3],n2", 6),
        ValueError,
        errors.TopologyError,
        "the node list 'n[1-3],n2' names 'n2' twice; name each host once",
    ),
    (
        lambda: read_topology({"a": "s1", "b": "s1"}, 3),
        ValueError,
        errors.TopologyError,
        (
            "on does not say how many GPUs a, b have; 3 ranks do not spread evenly; give "
            "gpus_per_host, or write 'name slots=8' for each host"
        ),
    ),
    (
        lambda: place("tp=8,dp=5", on={"a": "s1", "b": "s1"}, gpus_per_host=16),
        RuntimeError,
        errors.WorldSizeError,
        (
            "tp=8,dp=5 needs 40 GPUs, but the machine has 32; dp=4 (32 ranks) or tp=6 (30 ranks) "
            "would fit, and so would all with 8 more GPUs"
        ),
    ),
    (
        lambda: place("tp=2", on=8).write("order", __file__),
        FileExistsError,
        errors.FileKeptError,
        f"{__file__} exists, and is kept; force=True (--force) replaces it",
    ),
]

DRAW_CALLS = [
    (
        lambda: GridSet.tile(8, a="tp=2", b="tp=6").draw(edges=[("a", "c")]),
        ValueError,
        errors.DrawingError,
        "edges must be pairs of the names ['a', 'b'], got ('a', 'c')",
    ),
    (
        lambda: GridSet.tile(8, a="tp=2", b="tp=6").draw(edges="a-b"),
        ValueError,
        errors.DrawingError,
        "edges must be pairs of names, or 'chain', got 'a-b'",
    ),
]

TEXT_CALLS = [
    (
        lambda: RankLayout.parse("tp=2,tp=2"),
        ValueError,
        errors.NotationError,
        "dim 'tp' is given twice in 'tp=2,tp=2'",
    ),
    (
        lambda: RankLayout.from_order("tp-dp", tp=2, dp=2, cp=2),
        ValueError,
        errors.OrderError,
        "dim 'cp' has size 2, but order 'tp-dp' does not name it; add it to the order",
    ),
    (
        lambda: notation.parse_groups("tp,dp+"),
        ValueError,
        errors.NotationError,
        "'dp+' lacks a dim name; write dims like 'dp+cp'",
    ),
]

GRID_CALLS = [
    (
        lambda: grid([2, -1]),
        ValueError,
        errors.LayoutError,
        (
            "dim_names are missing: give ([2, 4], ['tp', 'dp']), or in one, 'tp=2,dp=4'; got "
            "[2, -1] alone"
        ),
    ),
    (
        lambda: grid("tp=2", ["tp"]),
        ValueError,
        errors.LayoutError,
        "dim_names may not be given beside 'tp=2', which names the dims",
    ),
    (
        lambda: grid(RankLayout([2], ["tp"]), None, 4),
        ValueError,
        errors.LayoutError,
        (
            "a RankLayout has its dim_names and rank_offset: give neither beside "
            "RankLayout(shape=(2,), dim_names=('tp',), rank_offset=0, strides=(1,))"
        ),
    ),
    (
        grid,
        ValueError,
        errors.LayoutError,
        (
            "a grid needs its sizes, as in HyperCommGrid('tp=2,dp=-1'), or the environment's "
            "HYPERCOMM_LAYOUT"
        ),
    ),
    (
        lambda: grid([4], ["tp"], cover="exact"),
        RuntimeError,
        errors.WorldSizeError,
        (
            "cover='exact', but the grid tp=4 = 4 ranks leaves 4 of the world's 8 ranks out; "
            "change a size so that the sizes multiply to 8"
        ),
    ),
    (
        lambda: grid([8], ["tp"], cover="all"),
        ValueError,
        errors.GroupOptionsError,
        "cover must be one of ['any', 'exact'], got 'all'",
    ),
    (
        lambda: grid([8], ["tp"], creation="magic"),
        ValueError,
        errors.GroupOptionsError,
        "creation must be one of ['auto', 'local', 'split', 'enumerate'], got 'magic'",
    ),
    (
        lambda: grid([8], ["tp"], creation="locl"),
        ValueError,
        errors.GroupOptionsError,
        (
            "creation must be one of ['auto', 'local', 'split', 'enumerate'], got 'locl'; did you "
            "mean 'local'?"
        ),
    ),
    (
        in_a_view(pickle.dumps),
        TypeError,
        errors.NotPicklableError,
        (
            "HyperCommGrid(tp=2,dp=4): ranks 0..7 of a world of 8 cannot be pickled or copied: it "
            "owns live process groups; send its layout, grid.layout, which is a value, and build "
            "the grid there: HyperCommGrid.from_layout(layout)"
        ),
    ),
    (
        lambda: grid([8], ["tp"], world_size=0),
        ValueError,
        errors.LayoutError,
        "world_size must be at least 1, got 0",
    ),
    (
        lambda: HyperCommGrid([8], ["tp"]),
        RuntimeError,
        errors.NotInitializedError,
        (
            "cannot tell the world size: torch.distributed is not initialised and the environment "
            "has no WORLD_SIZE; call torch.distributed.init_process_group() first, start the "
            "program with torchrun, or pass world_size="
        ),
    ),
    (
        lambda: grid([8], ["tp"]).create_pg("tp"),
        RuntimeError,
        errors.NotInitializedError,
        (
            "torch.distributed is not initialised, so the groups over tp cannot be created; call "
            "torch.distributed.init_process_group() first, or start the program with torchrun"
        ),
    ),
    (
        in_a_world(lambda grid: grid.create_pg("dp")),
        KeyError,
        errors.GroupExistsError,
        (
            "Process group 'dp' has already been created; get it with get_pg('dp'), "
            "create it once with ensure_pg, or create another over the same dims under a name of "
            "its own, name=..."
        ),
    ),
    (
        in_a_world(lambda grid: grid.get_pg(["tp", "cp"])),
        KeyError,
        errors.GroupMissingError,
        (
            "Process group for ['tp', 'cp'] hasn't been created; call create_pg(['tp', "
            "'cp']) first, on every rank of the grid; created so far: dp"
        ),
    ),
    (
        in_a_world(lambda grid: grid.get_pg("dp", name="twin")),
        KeyError,
        errors.GroupMissingError,
        (
            "Process group for 'dp', name='twin' hasn't been created; call create_pg('dp', "
            "name='twin') first, on every rank of the grid; created so far: dp"
        ),
    ),
    (
        in_a_world(lambda grid: grid.create_pg([])),
        ValueError,
        errors.LayoutError,
        "dims is empty; name at least one of ('tp', 'cp', 'dp')",
    ),
    (
        in_a_world(lambda grid: grid.create_pg("dpp+cp")),
        ValueError,
        errors.UnknownDimError,
        "unknown dim 'dpp'; this layout has dims ('tp', 'cp', 'dp'); did you mean 'dp'?",
    ),
    (
        in_a_world(lambda grid: grid.create_pg(7)),
        ValueError,
        errors.LayoutError,
        "dims must be a sequence, got 7",
    ),
    (
        in_a_world(lambda grid: grid.reshape("dp=-1", ranks=[0, 8])),
        ValueError,
        errors.LayoutError,
        "ranks must be in range(8), got 8",
    ),
    (
        in_a_world(lambda grid: grid.reshape("dp=-1", ranks=[0, "5"])),
        ValueError,
        errors.LayoutError,
        "every rank in ranks must be an int, got '5'",
    ),
    (
        in_a_world(lambda grid: grid.reshape("dp=-1", ranks={1})),
        ValueError,
        errors.LayoutError,
        "ranks must be a sequence, and a set has no order: {1}",
    ),
    (
        in_a_world(lambda grid: grid.reshape(RankLayout([2], ["dp"]), ranks=[0, 2])),
        ValueError,
        errors.WorldSizeError,
        (
            "target and ranks must name the same ranks, but ranks 1..2 are in one of them only: "
            "dp=2 has ranks 0..1, and ranks is (0, 2); give the sizes as text, as in 'dp=2'"
        ),
    ),
    (
        in_a_world(lambda grid: grid.reshape("tp=8", timeout=3)),
        ValueError,
        errors.GroupOptionsError,
        "timeout must be a datetime.timedelta, got 3; write timedelta(seconds=...)",
    ),
    (
        in_a_world(lambda _: renew_world([0, 1])),
        RuntimeError,
        errors.JoinError,
        "the ranks of this world are not there: it is a fake or a simulated one",
    ),
    (
        in_a_world(lambda _: renew_world([0, 8])),
        ValueError,
        errors.LayoutError,
        "ranks must be in range(8), got 8",
    ),
    (
        in_a_world(lambda _: renew_world([0], store="store")),
        RuntimeError,
        errors.JoinError,
        "store must be a store of torch.distributed, got 'store'",
    ),
    (
        lambda: renew_world([0]),
        RuntimeError,
        errors.NotInitializedError,
        ("torch.distributed is not initialised; call torch.distributed.init_process_group()"),
    ),
    (
        in_a_world(lambda grid: grid.survivors(None)),
        ValueError,
        errors.GroupOptionsError,
        "timeout must be a datetime.timedelta, got None; write timedelta(seconds=...)",
    ),
    (
        in_a_world(after_destroy),
        RuntimeError,
        errors.GridDestroyedError,
        "this grid (tp=2,cp=2,dp=2) was destroyed; build a new one",
    ),
    (
        in_a_world(lambda grid: grid.create_pg("tp", timeout=30)),
        ValueError,
        errors.GroupOptionsError,
        "timeout must be a datetime.timedelta, got 30; write timedelta(seconds=...)",
    ),
    (
        in_a_world(lambda grid: grid.create_pg("tp", timeout=timedelta(0))),
        ValueError,
        errors.GroupOptionsError,
        "timeout must be longer than 0, got 0:00:00",
    ),
    (
        in_a_world(lambda grid: grid.create_pg("tp", backend="gloo", pg_options=7)),
        ValueError,
        errors.GroupOptionsError,
        (
            "pg_options 7 would be dropped: torch passes no options to backend 'gloo'; leave "
            "pg_options out"
        ),
    ),
    (
        lambda: fake_world(8, rank=8).__enter__(),
        ValueError,
        errors.LayoutError,
        "rank must be in range(8), got 8",
    ),
    (
        lambda: fake_world(2**24 + 1).__enter__(),
        ValueError,
        errors.LayoutError,
        "world_size must be at most 16777216, got 16777217",
    ),
    (
        lambda: fake_world(8, timeout=True).__enter__(),
        ValueError,
        errors.GroupOptionsError,
        "timeout must be a datetime.timedelta, got True; write timedelta(seconds=...)",
    ),
    (
        lambda: local_ranks("8").__enter__(),
        ValueError,
        errors.LayoutError,
        "world_size must be an int, got '8'",
    ),
    (
        lambda: local_ranks(8, 8).__enter__(),
        ValueError,
        errors.LayoutError,
        "rank must be in range(8), got 8",
    ),
    (
        lambda: local_ranks(4097).__enter__(),
        ValueError,
        errors.LayoutError,
        (
            "world_size must be at most 4096, got 4097; hypercomm.testing's fake_world() and "
            "simulate() stand for larger jobs, without numbers"
        ),
    ),
    pytest.param(
        in_a_world(lambda grid: grid.create_pg("tp", pg_options=7)),
        ValueError,
        errors.GroupOptionsError,
        "pg_options must be options of a backend, such as a ProcessGroupNCCL.Options, got 7",
        marks=pytest.mark.skipif(
            not c10d.takes_options("fake"), reason="this torch hands the fake backend no options"
        ),
    ),
    (
        in_a_world(lambda grid: grid.connect(timeout=5)),
        ValueError,
        errors.GroupOptionsError,
        "timeout must be a datetime.timedelta, got 5; write timedelta(seconds=...)",
    ),
    (
        in_a_world(lambda grid: grid.connect(progress="yes")),
        ValueError,
        errors.GroupOptionsError,
        "progress must be True, False or None, got 'yes'",
    ),
    (
        in_a_world(lambda grid: grid.connect(pipelines=["pp", "stage"])),
        KeyError,
        errors.UnknownDimError,
        "unknown dim 'stage' in pipelines; the grid has ['tp', 'cp', 'dp']",
    ),
    (
        in_a_world(lambda grid: grid.connect(pipelines=3)),
        ValueError,
        errors.LayoutError,
        "pipelines must be a sequence, got 3",
    ),
    (
        in_a_world(lambda _: create_hybrid_dp_cp_groups(5, [0, 1, 4, 99], None)),
        ValueError,
        errors.LayoutError,
        "ranks must be in range(8), got 99",
    ),
    (
        lambda: simulate(int, 2, args=7),
        ValueError,
        errors.LaunchError,
        "args must be a sequence of arguments, got 7",
    ),
    (
        lambda: run_ranks(int, 4097),
        ValueError,
        errors.LaunchError,
        (
            "nprocs must be at most 4096, got 4097; hypercomm.testing's fake_world() and "
            "simulate() stand for larger jobs"
        ),
    ),
]


# Each bad call gets its sentence, from a class of ours that legacy code can catch.
@pytest.mark.parametrize(
    ("call", "builtin", "ours", "sentence"), LAYOUT_CALLS + DRAW_CALLS + TEXT_CALLS + GRID_CALLS
)
def test_sentence(call, builtin, ours, sentence, monkeypatch):
    for variable in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(builtin, match=f"^{re.escape(sentence)}$") as caught:
        call()
    assert type(caught.value) is ours


# An unknown backend is refused with those that the installed torch knows, and what would bring it.
def test_unknown_backend():
    known = c10d.known_backends()
    sentence = (
        f"unknown backend 'bogus'; this torch knows {known}; to have 'bogus', install the package "
        f"that brings it, and import it if torch must know"
    )
    for call in (
        lambda: grid([8], ["tp"], backend="bogus"),
        in_a_world(lambda grid: grid.create_pg("tp", backend="bogus")),
    ):
        with pytest.raises(errors.GroupOptionsError, match=f"^{re.escape(sentence)}$"):
            call()


# A fake world does not hide a world that exists.
def test_fake_world_in_a_world():
    with (
        fake_world(8),
        pytest.raises(errors.WorldSizeError, match="initialised already, with 8 ranks"),
        fake_world(4),
    ):
        pass


# Every error is one of the family, and pickles: it may come from another process.
def test_family():
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.HyperCommError)
    assert str(errors.GroupMissingError("a sentence")) == "a sentence"  # not its repr
