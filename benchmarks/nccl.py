"""Try hypercomm on NCCL with one card: install, check, create, lose a rank, hang, transfer.

    python benchmarks/nccl.py                        # a card: installs torch into a fresh folder
    python benchmarks/nccl.py --here                 # with the torch that this Python has
    python benchmarks/nccl.py --here --backend gloo  # without a card: the parts that gloo can do

Needs a checkout and pip. All parts and the installation together take at most eight minutes. The
report names each part that was skipped because no time was left. Several ranks use one card,
because each rank appears to NCCL to be on a different host. A table and one JSON object are
printed, and saved in --out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import venv
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""A row of the report: what was measured, how, the value, and its unit unless it is text."""

CHECKOUT = Path(__file__).resolve().parent.parent
SIZES = "tp=2,cp=2,dp=2"
SEVEN = ("tp", "cp", "dp", "tp+cp", "cp+dp", "tp+dp", "tp+cp+dp")
LIMIT_S = 480.0

NOT_ON_ONE_CARD = {
    "hypercomm check --backend nccl without a launcher": "run_ranks gives rank i device i",
    "bandwidth of NVLink, NVSwitch and InfiniBand": "ranks on one card communicate over sockets",
    "NVLS, symmetric memory and CUDA IPC between ranks": "they need a card for each rank",
    "ranks of several hosts": "all processes are on one machine",
}
"""The properties that several ranks on one card cannot show, with the reasons."""

NEEDS_CARD = {
    "creation on a bound WORLD": "gloo's WORLD is not bound to a device, so nothing is split",
    "gpu tests": "pytest -m gpu needs a card",
}
"""The parts that are skipped on gloo, with the reasons."""


# ---- the installation, which uses only the standard library -------------------------------------


def install(folder: Path, limit_s: float) -> tuple[str, Row]:
    """Install torch for CUDA, hypercomm and pytest. Return the interpreter and a row to report."""
    began = time.monotonic()
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    wanted = [f"{CHECKOUT}[cli,testing]", "pytest-timeout"]
    run([python, "-m", "pip", "install", "-q", "--no-compile", *wanted], limit_s)
    size = sum(file.lstat().st_size for file in folder.rglob("*"))
    return python, {"seconds": time.monotonic() - began, "bytes": size}


def run(command: Sequence[str], limit_s: float, **environment: str) -> subprocess.CompletedProcess:
    """Run a command. If it fails, raise an error with the end of its output."""
    done = subprocess.run(  # noqa: S603
        command,
        capture_output=True,
        text=True,
        timeout=max(1.0, limit_s),
        check=False,
        env={**os.environ, **environment},
    )
    if done.returncode:
        text = (done.stdout + done.stderr).strip()
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {text[-2000:]}")
    return done


# ---- ranks --------------------------------------------------------------------------------------


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def environment_of(rank: int, size: int, port: int) -> dict[str, str]:
    """Return a launcher's variables. To NCCL, each rank appears to be on a different host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_HOSTID": f"host-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def ranks(
    function: Callable[..., Any],
    size: int,
    folder: Path,
    limit_s: float,
    *args: Any,
    victims: Sequence[int] = (),
    is_over: Callable[[], bool] = lambda: False,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Call `function(rank, *args)` on processes. Return the results, with None for a victim.

    The processes are forked from a server that has loaded torch, so they start fast. The server
    has not used CUDA.

    Args:
        function: The function that each rank calls.
        size: The number of ranks.
        folder: A new folder for the results.
        limit_s: How long to wait for the results.
        args: Further arguments of the function.
        victims: The ranks that do not return.
        is_over: A function that returns whether to end all ranks now. It is used only if all ranks
            are victims.
        environment: Further environment variables of the ranks.

    Raises:
        RuntimeError: A rank failed, with its traceback, or has not returned in time.
    """
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.device_mesh", "hypercomm.grid"])
    port = free_port()
    given = [{**environment_of(rank, size, port), **(environment or {})} for rank in range(size)]
    processes = [
        context.Process(target=_be, args=(function, rank, given[rank], str(folder), *args))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    awaited = {rank: folder / f"{rank}.json" for rank in range(size) if rank not in victims}
    deadline = time.monotonic() + limit_s
    try:
        while not (all(file.exists() for file in awaited.values()) if awaited else is_over()):
            dead = [rank for rank in awaited if processes[rank].exitcode is not None]
            lost = [rank for rank in dead if not awaited[rank].exists()]
            if lost or time.monotonic() > deadline:
                text = f"rank {lost[0]} died" if lost else f"no result after {limit_s:.0f} s"
                late = [rank for rank, file in awaited.items() if not file.exists()]
                raise RuntimeError(f"{text}; ranks {late} have not returned")
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.join()
    found = {rank: json.loads(file.read_text()) for rank, file in awaited.items()}
    for rank, one in found.items():
        if "error" in one:
            raise RuntimeError(f"rank {rank}: {one['error'][-2000:]}")
    return [found[rank]["value"] if rank in found else None for rank in range(size)]


def _be(
    function: Callable[..., Any], rank: int, environment: dict[str, str], folder: str, *args: Any
) -> None:
    os.environ.update(environment)
    try:
        told = {"value": function(rank, *args)}
    except BaseException:  # noqa: BLE001 - the parent raises it
        told = {"error": traceback.format_exc()}
    draft = Path(folder, f"{rank}.draft")
    draft.write_text(json.dumps(told))
    draft.rename(draft.with_suffix(".json"))
    signal.pause()  # the store is on rank 0, and a rank that ends breaks connections


def begin(backend: str, *, bound: bool = False, timeout_s: float = 60.0) -> Any:
    """Initialise torch.distributed. Return the device for tensors."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"device_id": device} if bound else {}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **options)
    meet(device)
    return device


def meet(device: Any) -> None:
    """Wait until all ranks have made this call, and the card has finished their work."""
    import torch
    import torch.distributed as dist

    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    if float(one) != dist.get_world_size():  # float() waits for the card
        raise RuntimeError(f"WORLD counts {float(one)} ranks of {dist.get_world_size()}")


def patience_of(backend: str) -> timedelta:
    """Return the timeout of groups that lose a rank. NCCL connects slowly and needs more time."""
    return timedelta(seconds=8 if backend == "nccl" else 4)


def used_bytes(device: Any) -> int:
    """Return how much memory of the card all ranks use together."""
    import torch

    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def sum_over(groups: Sequence[Any], device: Any) -> None:
    """All-reduce over each group, and raise if a sum is wrong."""
    import torch
    import torch.distributed as dist

    for group in groups:
        own = torch.tensor([10 ** dist.get_rank()], device=device)
        dist.all_reduce(own, group=group)
        right = sum(10**rank for rank in dist.get_process_group_ranks(group))
        if int(own) != right:
            raise RuntimeError(f"the sum over {group.group_desc} is {int(own)}, not {right}")


# ---- the parts ----------------------------------------------------------------------------------


def versions(backend: str, folder: Path, limit_s: float) -> Iterator[Row]:
    """Read the versions of torch, NCCL and the driver, and the name of the card."""
    del folder
    code = """
import json, torch
nccl = torch.cuda.is_available() and ".".join(map(str, torch.cuda.nccl.version()))
card = torch.cuda.is_available() and torch.cuda.get_device_name(0)
print(json.dumps({"torch": torch.__version__, "CUDA of torch": torch.version.cuda or "none",
                  "NCCL": nccl or "not seen", "card": card or "none"}))
"""
    found = json.loads(run([sys.executable, "-c", code], limit_s).stdout.splitlines()[-1])
    found["driver"] = "none"
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
        with contextlib.suppress(RuntimeError):
            found["driver"] = run(command, 30).stdout.strip().replace("\n", "; ")
    found |= {"Python": platform.python_version(), "cores": os.cpu_count() or 0}
    found |= {"backend": backend, "system": platform.platform()}
    for what, value in found.items():
        yield {"what": what, "value": str(value)}
    if backend == "nccl" and found["card"] == "none":
        raise RuntimeError("torch sees no card; --backend gloo runs the parts that need no card")


def check(backend: str, folder: Path, limit_s: float) -> Iterator[Row]:
    """Run `hypercomm check` as a launcher would: on 8 ranks of NCCL, or on 4 of gloo."""
    folder.mkdir(parents=True)
    sizes, count = (SIZES, 8) if backend == "nccl" else ("tp=2,dp=2", 4)
    command = [sys.executable, "-m", "hypercomm", "check", sizes, "--backend", backend]
    command += ["--json", "--timeout", str(limit_s)]
    began, port = time.monotonic(), free_port()
    with contextlib.ExitStack() as ends:
        started = []
        for rank in range(count):
            out = ends.enter_context((folder / f"{rank}.out").open("w+"))
            environment = {
                **os.environ,
                **environment_of(rank, count, port),
                "OMP_NUM_THREADS": "1",
            }
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)  # noqa: S603
            ends.callback(process.wait)
            ends.callback(process.kill)
            started.append((process, out))
        for process, _ in started:
            process.wait(max(1.0, limit_s - (time.monotonic() - began)))
        text = (folder / "0.out").read_text()
    if any(process.returncode for process, _ in started):
        raise RuntimeError(f"hypercomm check ended with an error: {text[-2000:]}")
    report = json.loads(text[text.index("{") :])
    if not report["ok"] or len(report["groups"]) != count - 1:  # each combination of dims
        raise RuntimeError(f"hypercomm check: {report}")
    for group in report["groups"]:
        by = f"{'+'.join(group['dims'])}, {group['groups']} x {group['size']}"
        yield {"what": "create", "by": by, "value": group["creation_s"], "unit": "s"}
        speed = group["bandwidth_bytes_per_s"] / 1e9
        yield {"what": "all-reduce of 4 MiB", "by": by, "value": speed, "unit": "GB/s"}
    yield {"what": "hypercomm check", "value": time.monotonic() - began, "unit": "s"}


def creation(backend: str, folder: Path, limit_s: float) -> Iterator[Row]:
    """Create groups over seven sets of dims on 8 ranks. WORLD is not bound to a device."""
    yield from _creation(backend, folder, limit_s, bound=False)


def creation_bound(backend: str, folder: Path, limit_s: float) -> Iterator[Row]:
    """Create groups over seven sets of dims on 8 ranks. WORLD is bound to the card."""
    yield from _creation(backend, folder, limit_s, bound=True)


def _creation(backend: str, folder: Path, limit_s: float, *, bound: bool) -> Iterator[Row]:
    found = ranks(_create_each, 8, folder, limit_s, backend, bound)
    for way, first in found[0].items():
        if "why" in first:
            yield {"what": "skipped", "by": way, "value": first["why"]}
            continue
        for what in ("create", "first collective", "connect()", "first collective after connect()"):
            if what in first:
                slowest = max(one[way][what] for one in found)
                yield {"what": what, "by": way, "value": slowest, "unit": "s"}
        if backend == "nccl":
            used = first["bytes"] / first["communicators"] / (1 << 20)
            yield {
                "what": "GPU memory for each communicator",
                "by": way,
                "value": used,
                "unit": "MiB",
            }


def _create_each(rank: int, backend: str, bound: bool) -> dict[str, Any]:
    """Measure on a rank each way to create the groups."""
    import torch.distributed as dist

    from hypercomm import HyperCommGrid
    from hypercomm.errors import CreationError

    del rank
    device = begin(backend, bound=bound)
    lazily = {"local, lazy_init=True": True, "local, lazy_init=False": False}
    ways: dict[str, dict[str, Any]] = {"local": {}, **{name: {} for name in lazily}}
    ways |= {"split": {}} if bound else {"enumerate": {}}
    ways |= {"dims of size 1": {}, "dims of size 1, share='identical'": {}}
    for cycle in range(2):  # the first cycle also loads modules; only the second is reported
        for way in ways:
            sizes = "tp=2,cp=1,dp=4" if "size 1" in way else SIZES
            options: dict[str, Any] = {
                "creation": way if way in {"split", "enumerate"} else "local"
            }
            options |= {"share": "identical"} if "share" in way else {}
            options |= {"lazy_init": lazily[way]} if way in lazily else {}
            meet(device)
            try:
                with HyperCommGrid(sizes, name=f"{way} {cycle}", **options) as grid:
                    ways[way] = _timed(device, lambda grid=grid: grid.create_pgs(SEVEN))
                with HyperCommGrid(sizes, name=f"{way} again {cycle}", **options) as grid:
                    grid.create_pgs(SEVEN)
                    meet(device)
                    ways[way] |= _connected(grid, device)
            except CreationError as error:
                ways[way] = {"why": str(error)}
        for name, peer in (("torch new_group", _new_groups), ("torch DeviceMesh", _device_mesh)):
            meet(device)
            before = {*dist.distributed_c10d._world.pg_map}
            ways[name] = _timed(device, lambda peer=peer: peer(device))
            for group in {*dist.distributed_c10d._world.pg_map} - before:
                dist.destroy_process_group(group)
    return ways


def _timed(device: Any, create: Callable[[], Sequence[Any]]) -> dict[str, Any]:
    """Measure the creation of groups, their first collective, and their memory on the card."""
    before, began = used_bytes(device), time.perf_counter()
    groups = create()
    meet(device)
    created_s = time.perf_counter() - began
    began = time.perf_counter()
    sum_over(groups, device)
    first_s = time.perf_counter() - began
    meet(device)
    import torch.distributed as dist

    several = len({group.group_name for group in groups if group.size() > 1})
    return {
        "create": created_s,
        "first collective": first_s,
        "bytes": used_bytes(device) - before,
        "communicators": several * dist.get_world_size(),
    }


def _connected(grid: Any, device: Any) -> dict[str, float]:
    """Measure `connect()`, and the first collective after it."""
    began = time.perf_counter()
    grid.connect()
    connect_s = time.perf_counter() - began
    meet(device)
    began = time.perf_counter()
    sum_over([group for group in grid.pgs.values() if group is not None], device)
    first_s = time.perf_counter() - began
    return {"connect()": connect_s, "first collective after connect()": first_s}


def _new_groups(device: Any) -> list[Any]:
    """Create the same groups as most programs do: each rank creates all of them."""
    import torch.distributed as dist

    from hypercomm import RankLayout

    del device
    layout, own = RankLayout(SIZES), []
    for dims in SEVEN:
        for members in layout.groups(dims).to_lists():
            group = dist.new_group(members)
            if dist.get_rank() in members:
                own.append(group)
    return own


def _device_mesh(device: Any) -> list[Any]:
    """Create the same groups as a DeviceMesh with its flattened dims."""
    import warnings

    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore")  # torch deprecates names of flattened dims
    names = ("dp", "cp", "tp")  # the last dim varies fastest
    mesh = init_device_mesh(device.type, (2, 2, 2), mesh_dim_names=names)
    groups = [mesh.get_group(name) for name in names]
    several = (("cp", "tp"), ("dp", "cp"), ("dp", "tp"), names)
    return groups + [mesh[dims]._flatten("_".join(dims)).get_group() for dims in several]


def abort(backend: str, folder: Path, limit_s: float) -> Iterator[Row]:
    """End a grid whose collective waits for a rank that does not join it."""
    found = ranks(_abort, 4, folder, limit_s, backend)
    yield {"what": "abort()", "value": max(one["seconds"] for one in found[1:]), "unit": "s"}
    pending = all(one["pending"] for one in found[1:])
    yield {"what": "the collective was pending", "value": str(pending)}
    if not pending:
        raise RuntimeError("the collective had ended before the abort")


def _abort(rank: int, backend: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from hypercomm import HyperCommGrid

    device = begin(backend, bound=backend == "nccl")
    store = dist.distributed_c10d._get_default_store()
    grid = HyperCommGrid("dp=4", creation="local")
    sum_over([grid.create_pg("dp", timeout=patience_of(backend))], device)
    if rank == 0:
        store.wait([f"aborted by {other}" for other in (1, 2, 3)], timedelta(seconds=60))
        return {}
    work = dist.all_reduce(torch.ones(1, device=device), group=grid.get_pg("dp"), async_op=True)
    time.sleep(1)
    pending = not work.is_completed()
    del work
    began = time.perf_counter()
    grid.abort()
    seconds = time.perf_counter() - began
    store.set(f"aborted by {rank}", "")
    return {"seconds": seconds, "pending": pending}


def killed(backend: str, folder: Path, limit_s: float) -> Iterator[Row]:
    """Kill a rank, find the survivors, and continue with them."""
    found = ranks(_lose, 4, folder, limit_s, backend, victims=[3])
    for what in ("the collective after the death fails", "survivors()", "reshape(ranks=)"):
        yield {"what": what, "value": max(one[what] for one in found[:3]), "unit": "s"}
    for rank, one in enumerate(found[:3]):
        yield {"what": "the error", "by": f"rank {rank}", "value": one["error"]}


def _lose(rank: int, backend: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from hypercomm import HyperCommGrid

    device = begin(backend)
    grid = HyperCommGrid("dp=4", creation="local")
    grid.create_pg("dp", timeout=patience_of(backend))
    sum_over([grid.get_pg("dp")], device)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    began, error = time.perf_counter(), "none within 3 s"
    try:
        work = dist.all_reduce(torch.ones(1, device=device), group=grid.get_pg("dp"), async_op=True)
        while not work.is_completed() and time.perf_counter() - began < 3:
            time.sleep(0.01)
        if work.is_completed():
            work.wait()
        del work
    except RuntimeError as caught:
        error = f"{type(caught).__name__}: {str(caught).splitlines()[0][:160]}"
    told: dict[str, Any] = {"error": error}
    told["the collective after the death fails"] = time.perf_counter() - began
    began = time.perf_counter()
    left = grid.survivors(1.5 * patience_of(backend))
    told["survivors()"] = time.perf_counter() - began
    if left != (0, 1, 2):
        raise RuntimeError(f"survivors() found {left}")
    began = time.perf_counter()
    grid.reshape("dp=3", ranks=left)
    sum_over([grid.get_pg("dp")], device)
    told["reshape(ranks=)"] = time.perf_counter() - began
    return told


def hang(backend: str, folder: Path, limit_s: float) -> Iterator[Row]:
    """Make a rank skip a collective, and analyse the dumps of torch (NCCL) or a watch (gloo)."""
    dumps = folder / "dumps"
    dumps.mkdir(parents=True)
    prefix = str(dumps / "nccl_trace_rank_")
    recorder = {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
    }
    with contextlib.suppress(RuntimeError):  # dumps are analysed even if some are missing
        ranks(
            _hang,
            4,
            folder / "ranks",
            min(limit_s - 10, 40),
            backend,
            str(dumps),
            victims=range(4),  # with NCCL, torch ends the ranks after the timeout
            is_over=lambda: len([*dumps.iterdir()]) == 4,
            environment=recorder,
        )
    files = sorted(file.name for file in dumps.iterdir())
    yield {"what": "dumps", "value": ", ".join(files) or "none"}
    if not files:
        raise RuntimeError("no rank has written a dump")
    command = [sys.executable, "-m", "hypercomm", "blame", str(dumps), "--layout", "tp=2,dp=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    verdict = " ".join(done.stdout.split())
    yield {"what": "hypercomm blame", "value": verdict[:400]}
    if done.returncode != 1 or not verdict.startswith("rank 2 "):
        raise RuntimeError(
            f"blame ended with {done.returncode} and does not name rank 2: {verdict}"
        )


def _hang(rank: int, backend: str, dumps: str) -> None:
    from hypercomm import HyperCommGrid

    device = begin(backend, timeout_s=8.0)
    with HyperCommGrid("tp=2,dp=2") as grid:
        groups = grid.create_pgs(["tp", "dp"], timeout=timedelta(seconds=8))
        watch = contextlib.nullcontext() if backend == "nccl" else grid.watch(1.5, dumps)
        with watch:
            for step in range(5):
                sum_over(groups[:1], device)
                if rank == 2 and step == 3:
                    time.sleep(600)
                sum_over(groups[1:], device)


def transfer(backend: str, folder: Path, limit_s: float) -> Iterator[Row]:
    """Move parameters from a trainer of four ranks to an engine of four ranks with other shards."""
    size = 1 << 30 if backend == "nccl" else 1 << 25
    found = ranks(_transfer, 8, folder, limit_s, backend, size)
    yield {"what": "parameters", "value": size / 1e9, "unit": "GB"}
    for what in ("first", "again", "again, verify=True"):
        seconds = max(one[what] for one in found)
        yield {"what": "transfer_state", "by": what, "value": seconds, "unit": "s"}
        yield {"what": "speed", "by": what, "value": size / 1e9 / seconds, "unit": "GB/s"}


def _transfer(rank: int, backend: str, size: int) -> dict[str, float]:
    import torch

    from hypercomm import RankLayout, RankMapping, transfer_state

    device = begin(backend)
    trainer, engine = RankLayout("tp=4"), RankLayout("tp=2,dp=2", rank_offset=4)
    mapping = RankMapping.weights(trainer, engine, {"tp": 0})
    count, width = 32, 1024
    rows = size // count // width // 4

    def part(parts: int, at: int, number: int) -> Any:
        first = at * (rows // parts)
        column = torch.arange(first, first + rows // parts, device=device, dtype=torch.float32)
        return column[:, None].add(number).expand(-1, width).contiguous()

    names = [f"layer {number}" for number in range(count)]
    state = into = None
    if rank < 4:
        state = {name: part(4, rank, number) for number, name in enumerate(names)}
    else:
        empty = torch.zeros(rows // 2, width, device=device)
        into = {name: empty.clone() for name in names}
    took = {}
    for what, options in (("first", {}), ("again", {}), ("again, verify=True", {"verify": True})):
        for tensor in (into or {}).values():
            tensor.zero_()
        meet(device)
        began = time.perf_counter()
        transfer_state(mapping, state, into=into, **options)
        meet(device)
        took[what] = time.perf_counter() - began
        for number, name in enumerate(names if into else ()):
            if not torch.equal(into[name], part(2, (rank - 4) % 2, number)):
                raise RuntimeError(f"{name} arrived with wrong numbers")
    return took


def gpu_tests(backend: str, folder: Path, limit_s: float) -> Iterator[Row]:
    """Run the tests of NCCL."""
    del backend
    folder.mkdir(parents=True)
    file = CHECKOUT / "tests" / "process_groups" / "test_nccl.py"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-rA", "--tb=short", str(file)]
    with (folder / "out").open("w+") as out:
        process = subprocess.Popen(  # noqa: S603
            command, stdout=out, stderr=subprocess.STDOUT, cwd=CHECKOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = (folder / "out").read_text()
    for line in text.splitlines():
        word, _, test = line.partition(" ")
        if word in {"PASSED", "FAILED", "ERROR"}:
            yield {"what": word.lower(), "value": test.partition("::")[2]}
    if process.returncode or "PASSED" not in text:  # all may have been skipped
        raise RuntimeError(f"pytest -m gpu ended with {process.returncode}: {text[-3000:]}")


PARTS: dict[str, tuple[Callable[[str, Path, float], Iterator[Row]], float]] = {
    "versions": (versions, 60),
    "check": (check, 90),
    "creation": (creation, 120),
    "creation on a bound WORLD": (creation_bound, 120),
    "abort": (abort, 60),
    "a killed rank": (killed, 60),
    "a planted hang": (hang, 60),
    "transfer_state": (transfer, 90),
    "gpu tests": (gpu_tests, 240),
}
"""The parts in their order, each with its time limit in seconds."""


def measure(backend: str, wanted: Sequence[str], limit_s: float) -> list[dict[str, Any]]:
    """Run the parts. If a part fails, the other parts still run."""
    began, found = time.monotonic(), []
    with tempfile.TemporaryDirectory() as scratch:
        for number, name in enumerate(wanted):
            function, most_s = PARTS[name]
            left_s = limit_s - (time.monotonic() - began)
            part: dict[str, Any] = {"part": name, "outcome": "ok", "why": "", "rows": []}
            started = time.monotonic()
            reason = NEEDS_CARD.get(name, "") if backend == "gloo" else ""
            if not reason and left_s < 10:
                reason = f"{left_s:.0f} s are left of the time for all parts"
            try:
                limit = min(most_s, left_s)
                rows = () if reason else function(backend, Path(scratch, str(number)), limit)
                for row in rows:
                    part["rows"].append(row)
            except Exception as error:  # noqa: BLE001 - the other parts still run
                part |= {"outcome": "failed", "why": f"{type(error).__name__}: {error}"}
            if reason:
                part |= {"outcome": "skipped", "why": reason}
            part["seconds"] = time.monotonic() - started
            print(
                f"{name}: {part['outcome']}, {part['seconds']:.1f} s", file=sys.stderr, flush=True
            )
            found.append(part)
            if name == "versions" and part["outcome"] == "failed":
                break
    return found


# ---- the report ---------------------------------------------------------------------------------


def as_text(report: dict[str, Any]) -> str:
    """Return the report as a table."""
    lines = [("part", "what", "by", "value")]
    for part in report["parts"]:
        lines.append((part["part"], part["outcome"], "", f"{part['seconds']:.1f} s"))
        for row in part["rows"]:
            value = row["value"]
            text = value if isinstance(value, str) else f"{value:.4g} {row['unit']}"
            lines.append(("", row["what"], row.get("by", ""), text))
        if part["why"]:
            lines.append(("", "why", "", " ".join(part["why"].split())[:300]))
    for what, why in report["not on one card"].items():
        lines.append(("not on one card", what, "", why))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    padded = (
        [cell.ljust(width) for cell, width in zip(line, widths, strict=False)] for line in lines
    )
    rows = [
        "  ".join([*cells, line[3]]).rstrip() for cells, line in zip(padded, lines, strict=True)
    ]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/nccl.py", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--here", action="store_true", help="installs nothing")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path("nccl_seen"))
    parser.add_argument("--parts-into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.parts_into:  # the process started below, which has torch
        found = measure(options.backend, options.only, options.limit)
        options.parts_into.write_text(json.dumps(found))
        return 0
    began, installed = time.monotonic(), None
    with tempfile.TemporaryDirectory() as scratch:
        python, environment = sys.executable, {"PYTHONPATH": str(CHECKOUT)}
        if not options.here:
            print("installing torch", file=sys.stderr, flush=True)
            python, installed = install(Path(scratch, "venv"), options.limit)
            environment = {"PYTHONPATH": ""}
        left_s = options.limit - (time.monotonic() - began)
        file = Path(scratch, "parts.json")
        command = [python, __file__, "--backend", options.backend, "--limit", str(left_s)]
        command += ["--parts-into", str(file), "--only", *options.only]
        subprocess.run(command, check=True, env={**os.environ, **environment})  # noqa: S603
        parts = json.loads(file.read_text())
    report = {
        "backend": options.backend,
        "install": installed,
        "seconds": time.monotonic() - began,
        "parts": parts,
        "not on one card": NOT_ON_ONE_CARD,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    text, as_json = as_text(report), json.dumps(report, indent=1)
    (options.out / "nccl.txt").write_text(text + "\n")
    (options.out / "nccl.json").write_text(as_json + "\n")
    print(text)
    print(as_json)
    return 1 if any(part["outcome"] == "failed" for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
