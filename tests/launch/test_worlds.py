"""Test join_world() on real processes."""

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import killable_ranks
import pytest
import torch
import torch.distributed as dist
from ports import free_port
from time_limits import scaled_s, wait_until

from hypercomm import GridSet, HyperCommGrid, RankMapping, join_world, transfer_state
from hypercomm.errors import (
    CreationError,
    LaunchError,
    NotInitializedError,
    WorldRestartedError,
    WorldSizeError,
)
from hypercomm.launch import worlds
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.world import current

SOON_S = 1.5
"""Ranks raise on a difference within a second, and a loaded machine needs time to run them."""

PARTS = {"trainer": 2, "engine": 1}
GOOD = {"name": "w", "parts": {"engine": 1}, "part": "engine", "rank": 0}
LIMIT_S = 1.0


# ---- processes without a job --------------------------------------------------------------------


class Crew:
    """Processes without a WORLD, each of which calls a function.

    The function gets a function `join` as its argument. `result` returns the result or the error.
    """

    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        self.processes = {}
        self.address = f"tcp://127.0.0.1:{self.port}"

    def start(self, act, part, *ranks, label="", **arguments):
        """Start a process for each of these ranks of a part. Each process calls `act(join)`."""
        for rank in ranks:
            given = {"name": "w", "parts": PARTS, "part": part, "rank": rank}
            given |= {"timeout": timedelta(seconds=20)} | arguments
            path = self.folder / (label or f"{part}{rank}")
            self.processes[path.name] = killable_ranks.start(
                _call_in_process, act, self.address, given, str(path)
            )
        return self

    def result(self, label, seconds=40):
        """Return the result or the error of a process, as written by `_call_in_process`."""
        path = self.folder / label
        wait_until(path.exists, seconds, lambda: f"{label} has no result")
        return json.loads(path.read_text())

    def values(self, *labels):
        """Return the results of processes."""
        return [self.result(label)["value"] for label in labels]

    def mark(self, name):
        """Let all processes that wait for this name continue."""
        (self.folder / f"mark {name}").write_text("true")

    def wait_for(self, *names):
        """Wait until processes have called `mark` with these names."""
        for name in names:
            self.result(f"mark {name}")

    def kill(self, label):
        self.processes[label].kill()
        self.processes[label].join()

    def end(self):
        for process in self.processes.values():
            process.kill()
            process.join()


def _call_in_process(act, address, given, path):
    def write(value, path=path):
        Path(f"{path}.draft").write_text(json.dumps(value))
        Path(f"{path}.draft").rename(path)

    def join():
        return join_world(address, **given)

    join.mark = lambda name: write(True, str(Path(path).parent / f"mark {name}"))
    join.folder = str(Path(path).parent / "watch")
    join.wait_for = lambda name: wait_until((Path(path).parent / f"mark {name}").exists)
    began = time.monotonic()
    try:
        write({"value": act(join), "seconds": time.monotonic() - began})
    except Exception as error:  # noqa: BLE001 - the test checks the error
        missing = getattr(error, "missing", ())
        seconds = time.monotonic() - began
        kind = type(error).__name__
        text = str(error)
        write({"kind": kind, "text": text, "missing": [*missing], "seconds": seconds})
    signal.pause()  # groups break if this process ends, and it may serve the store


@pytest.fixture
def crew(tmp_path) -> Iterator[Crew]:
    crew = Crew(tmp_path)
    yield crew
    crew.end()


def shake_hands(world):
    """Sum the ranks of the world over all of its ranks."""
    total = torch.tensor([world.rank])
    dist.all_reduce(total, group=world.pg)
    return int(total)


# ---- membership ---------------------------------------------------------------------------------


def use_groups(join):
    world = join()
    folder = join.folder
    with GridSet({"trainer": "tp=2,dp=2", "engine": "tp=2"}, world=world) as grids:
        grid = grids[world.part]
        created = grids.create_pgs({"trainer": ["tp", "dp"], "engine": ["tp"]})
        assert [pg is not None for pg in created[world.part]] == [True] * len(grid.dim_names)
        facts = {"tp": grid["tp"].ranks, "at": grid.coords(), "sum": shake_hands(world)}
        assert grid["tp"].sum(world.rank) == sum(grid["tp"].ranks)
        grid["tp"].barrier()
        connected = [row for row in grid.connect() if len(row.ranks) > 1]
        assert connected
        assert all(row.seconds > 0 for row in connected)
        grid.verify()
        with grid.watch(60, folder) as watch:
            assert watch.rank == world.rank
        own = torch.tensor([float(world.rank)])
        dist.broadcast(own, src=grid["tp"].ranks[1], group=grid["tp"].group)
        facts["from the second"] = own.item()
        received = torch.zeros(1)
        ring = [
            dist.P2POp(dist.isend, own + world.rank, (world.rank + 1) % 6, world.pg),
            dist.P2POp(dist.irecv, received, (world.rank - 1) % 6, world.pg),
        ]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        facts["ring"] = received.item()
        facts["is default"] = current() is world if dist.is_initialized() else None
    return facts


def in_a_job(act, port, rank, size):
    def body(join):
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=size - 1 - rank, world_size=size)
        return act(join)

    return body


# The trainers have a WORLD with other rank numbers, and the engines have no WORLD.
def test_grids_by_parts(crew):
    parts = {"trainer": 4, "engine": 2}
    port = free_port()
    for rank in range(4):
        crew.start(in_a_job(use_groups, port, rank, 4), "trainer", rank, parts=parts)
    crew.start(use_groups, "engine", 0, 1, parts=parts)
    for rank in range(6):
        label = f"trainer{rank}" if rank < 4 else f"engine{rank - 4}"
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        before = (rank - 1) % 6
        result = crew.result(label)
        assert result == {
            "value": {
                "tp": pair,
                "at": {"tp": rank % 2, "dp": rank // 2} if rank < 4 else {"tp": rank % 2},
                "sum": 15,
                "from the second": pair[1],
                "ring": before // 2 * 2 + 1 + before,
                "is default": False if rank < 4 else None,
            },
            "seconds": result["seconds"],
        }


def move_weights(join, rounds=2):
    world = join()
    layouts = GridSet({"trainer": "tp=2", "engine": "tp=1"}, world=world).layouts
    mapping = RankMapping(layouts["trainer"], layouts["engine"], along=None, shards={"tp": 0})
    found = []
    for number in range(rounds):
        own = into = None
        if world.part == "trainer":
            own = {"w": torch.arange(4.0) + 4 * world.rank + 100 * number}
        else:
            into = {"w": torch.zeros(8)}
        transfer_state(mapping, own, into=into, world=world)
        found.append(None if into is None else into["w"].tolist())
    return found


def test_weights_move_between_parts(crew):
    crew.start(move_weights, "trainer", 0, 1).start(move_weights, "engine", 0)
    wanted = [[100.0 * number + each for each in range(8)] for number in range(2)]
    assert crew.result("engine0")["value"] == wanted


# ---- differences and missing ranks --------------------------------------------------------------


def rank_in(join):
    return join().rank


def rank_in_newer(join):
    worlds.__version__ = "99"
    return join().rank


# All processes raise on a difference. A process that arrives after the others have raised waits for
# their next attempt. (tests/meetings tests all possible differences.)
def test_difference_fails_all_processes(crew):
    limit = timedelta(seconds=scaled_s(3))
    crew.start(rank_in, "trainer", 0, 1, timeout=limit)
    crew.start(rank_in_newer, "engine", 0, timeout=limit)
    errors = [crew.result(label) for label in ("trainer0", "trainer1", "engine0")]
    differing = [error for error in errors if error["kind"] == "PlanMismatchError"]
    others = {error["kind"] for error in errors if error not in differing}
    assert len(differing) >= 2, errors
    assert others <= {"GroupCreationTimeout"}, errors
    for part in ("hypercomm: ", "engine rank 0", "trainer rank", socket.gethostname()):
        assert all(part in error["text"] for error in differing), errors


# ---- restarts -----------------------------------------------------------------------------------


# An engine is killed, or is only slow, and is started again. The trainers raise in the call in
# which they wait. After rejoin(), they continue with new groups of the grid. If the first engine
# still runs, its calls raise.
@pytest.mark.parametrize("is_waiting", [True, pytest.param(False, marks=pytest.mark.full)])
def test_engine_restarts(crew, is_waiting):
    def train(join):
        world = join()
        grid = HyperCommGrid("all=3", world=world)
        sums = [shake_hands(world)]
        grid.create_pg("all")
        join.mark(f"trainer {world.rank}")
        if not is_waiting:
            join.wait_for("the next engine")
        began = time.monotonic()
        with pytest.raises(WorldRestartedError, match=r"engine rank 0 of 1 \(host"):
            grid.create_pg("all", name="next")
        took_s = time.monotonic() - began
        world.rejoin()
        assert dict(grid.pgs) == {}
        total = torch.tensor([world.rank + 1])
        dist.all_reduce(total, group=grid["all"].group)
        return [*sums, shake_hands(world), int(total), is_waiting or took_s < scaled_s(SOON_S)]

    def serve(join):
        world = join()
        grid = HyperCommGrid("all=3", world=world)
        if world.incarnation == 0:
            shake_hands(world)
            grid.create_pg("all")
            join.mark("engine")
            join.wait_for("awake")
            for call in (lambda: grid.create_pg("all", name="late"), world.rejoin):
                with pytest.raises(WorldRestartedError) as caught:
                    call()
            return str(caught.value)
        total = torch.tensor([world.rank + 1])
        dist.all_reduce(total, group=grid["all"].group)
        shake_hands(world)
        return int(total)

    def serve_again(join):
        threading.Timer(0.3, join.mark, ["the next engine"]).start()
        return serve(join)

    crew.start(train, "trainer", 0, 1).start(serve, "engine", 0, serve=False)
    crew.wait_for("trainer 0", "trainer 1", "engine")
    if is_waiting:
        crew.kill("engine0")
    crew.start(serve_again, "engine", 0, label="again", serve=False)
    assert crew.values("again", "trainer0", "trainer1") == [6, [3, 3, 6, True], [3, 3, 6, True]]
    if not is_waiting:
        crew.mark("awake")
        assert "end this process" in crew.result("engine0")["value"]


# If the engine is lost, the trainers can continue in the world without it.
@pytest.mark.full
def test_survivors_continue_in_a_world(crew):
    def train(join):
        world = join()
        with HyperCommGrid("all=3", world=world) as grid:
            grid.create_pg("all", timeout=timedelta(seconds=1))
            shake_hands(world)
            join.mark(f"trainer {world.rank}")
            join.wait_for("the loss")
            left = grid.survivors(timedelta(seconds=2))
            grid.reshape("all=2", ranks=left)
            total = torch.tensor([world.rank + 1])
            dist.all_reduce(total, group=grid.get_pg("all"))
            rows = [row.ranks for row in grid.connect()]
            return [left, rows, int(total)]

    def be_lost(join):
        world = join()
        with HyperCommGrid("all=3", world=world) as grid:
            grid.create_pg("all", timeout=timedelta(seconds=1))
            shake_hands(world)
            join.mark("engine")
            signal.pause()

    crew.start(train, "trainer", 0, 1).start(be_lost, "engine", 0, serve=False)
    crew.wait_for("trainer 0", "trainer 1", "engine")
    crew.kill("engine0")
    crew.mark("the loss")
    survivors = [[0, 1], [[0, 1]], 3]
    assert crew.values("trainer0", "trainer1") == [survivors, survivors]


# Rejoining adds no keys to the store, no threads and no open files.
@pytest.mark.full
def test_many_rejoins_leak_nothing(crew):
    def again_and_again(join):
        world = join()
        sizes = []
        for number in range(40):
            grid = HyperCommGrid("all=2", world=world)
            grid.create_pg("all")
            shake_hands(world)
            grid.destroy()
            world.rejoin()
            if number in (9, 39):
                shake_hands(world)
                torchdist.release()  # no member connects any more
                time.sleep(0.6)  # destroyed groups keep their connections for half a second
                files = len([*Path("/proc/self/fd").iterdir()])
                sizes.append([world.store.num_keys(), threading.active_count(), files])
                shake_hands(world)
        return sizes

    parts = {"trainer": 1, "engine": 1}
    crew.start(again_and_again, "trainer", 0, parts=parts)
    crew.start(again_and_again, "engine", 0, parts=parts)
    for label in ("trainer0", "engine0"):
        early, late = crew.result(label, seconds=100)["value"]
        assert all(two <= one + 2 for one, two in zip(early, late, strict=True)), (early, late)


# ---- the store ----------------------------------------------------------------------------------


@contextlib.contextmanager
def other_service(port, reply):
    """Run a service that is not a store on a port. The service sends `reply`."""
    is_over = threading.Event()

    def serve():
        with contextlib.ExitStack() as held, socket.create_server(("127.0.0.1", port)) as server:
            server.settimeout(0.05)
            while not is_over.is_set():
                with contextlib.suppress(OSError):
                    held.enter_context(server.accept()[0]).sendall(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    is_over.set()
    thread.join()


@pytest.mark.full
@pytest.mark.parametrize("reply", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_port_without_a_store(reply):
    port = free_port()
    began = time.monotonic()
    service = contextlib.nullcontext() if reply is None else other_service(port, reply)
    given = {**GOOD, "serve": False, "timeout": timedelta(seconds=LIMIT_S)}
    with service, pytest.raises(LaunchError, match="no store of torch answers"):
        join_world(f"tcp://127.0.0.1:{port}", **given)
    assert time.monotonic() - began < LIMIT_S + scaled_s(2)


# If the process that serves the store is killed while others wait, each waiting process raises.
# Once all processes have joined again at the same address, they can continue.
@pytest.mark.full
def test_store_is_restarted(crew):
    def train(join):
        world = join()
        shake_hands(world)
        join.mark(f"trainer {world.rank}")
        with pytest.raises(CreationError, match="the store of world 'w'"):
            HyperCommGrid("all=3", world=world).create_pg("all", timeout=timedelta(seconds=5))
        join.mark(f"failed {world.rank}")
        world.rejoin()
        return shake_hands(world)

    def serve(join):
        shake_hands(join())
        join.mark("engine")
        signal.pause()

    crew.start(serve, "engine", 0, serve=True).start(train, "trainer", 0, 1, serve=False)
    crew.wait_for("trainer 0", "trainer 1", "engine")
    crew.kill("engine0")
    crew.wait_for("failed 0", "failed 1")
    crew.start(lambda join: shake_hands(join()), "engine", 0, label="again", serve=True)
    assert crew.values("again", "trainer0", "trainer1") == [3, 3, 3]


# ---- worlds of one process ----------------------------------------------------------------------


def test_world_of_one():
    with join_world(dist.HashStore(), **GOOD) as world:
        assert (world.title(0), world.size, world.is_default) == ("engine rank 0 of 1", 1, False)
        with HyperCommGrid("tp=1", world=world) as grid:
            assert grid.create_pg("tp").size() == 1
        for end in (world.leave, world.rejoin):
            with world.as_default(), pytest.raises(CreationError, match="as_default"):
                end()
        with pytest.raises(WorldSizeError, match="'engine': tp=2 needs 2 ranks; the world has 1"):
            GridSet({"engine": "tp=2"}, world=world)
    with pytest.raises(NotInitializedError, match="not in world 'w'"):
        _ = world.pg
    world.leave()


def test_one_name_in_two_stores():
    first = join_world(dist.HashStore(), **GOOD)
    store = dist.HashStore()
    with pytest.raises(ValueError, match="group name"):
        join_world(store, **GOOD)
    first.leave()
    with join_world(store, **GOOD) as second:
        assert shake_hands(second) == 0
