"""Test a watch in one process: its records, the restoration of torch, and invalid calls."""

import contextlib
import json
import pickle
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid
from hypercomm.blame.evidence import read_folder
from hypercomm.errors import NotInitializedError, ToolError
from hypercomm.testing import fake_world


@pytest.fixture
def grid() -> Iterator[HyperCommGrid]:
    with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4") as made:
        made.register_view("expert", [4, 2], ["ep", "edp"])
        yield made


def methods_of_process_group():
    return dict(vars(dist.ProcessGroup))


# If two threads start a watch at the same time, the second raises, and torch is restored.
def test_two_threads_start_a_watch(grid, tmp_path, monkeypatch):
    before = methods_of_process_group()
    both = threading.Barrier(2)
    results = []
    write_text = Path.write_text

    def write_together(path, text):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.1)
        return write_text(path, text)

    def start():
        try:
            results.append(grid.watch(60, tmp_path))
        except ToolError as error:
            results.append(error)

    monkeypatch.setattr(Path, "write_text", write_together)
    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert sorted(isinstance(result, ToolError) for result in results) == [False, True]
    for result in results:
        if not isinstance(result, ToolError):
            result.stop()
    assert methods_of_process_group() == before


def reason_of(watch):
    return json.loads(watch.file.read_text())["hypercomm"]["why"]


# Every call of torch.distributed that communicates is recorded, with its name, shapes and dtype.
@pytest.mark.filterwarnings("ignore:`torch.distributed.:FutureWarning")
def test_all_calls_are_recorded(grid, tmp_path):
    before = methods_of_process_group()
    one = torch.ones(2, 3)
    pair = [torch.ones(1), torch.ones(1)]
    tp = grid.create_pg("tp")
    with grid.watch(60, tmp_path) as watch:
        dist.all_reduce(one, group=tp)
        dist.broadcast(one, src=4, group=tp)
        dist.reduce(one, dst=4, group=tp)
        dist.all_gather(pair, torch.ones(1), group=tp)
        dist.all_gather_into_tensor(torch.ones(4, 3), one, group=tp)
        dist.reduce_scatter_tensor(torch.ones(1, 3), one, group=tp)
        dist.reduce_scatter(torch.ones(1), pair, group=tp)
        dist.all_to_all_single(one, one, group=tp)
        dist.barrier(group=tp)
        dist.send(one, 4, group=tp)
        dist.recv(one, 4, group=tp)
        dist.send(one, 4, group=tp)
    assert methods_of_process_group() == before
    record = json.loads(watch.file.read_text())
    (name,) = (name for name, group in record["pg_config"].items() if group["desc"] == "tp")
    assert record["pg_config"][name]["ranks"] == "[4, 5]"
    entries = record["entries"]
    names = ["all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base"]
    names += ["_reduce_scatter_base", "reduce_scatter", "all_to_all_single", "barrier"]
    names += ["send 1->0", "recv 1<-0", "send 1->0"]
    assert [entry["profiling_name"] for entry in entries] == [f"fake:{name}" for name in names]
    assert [entry["collective_seq_id"] for entry in entries] == [*range(1, 10), 0, 0, 0]
    assert [entry["p2p_seq_id"] for entry in entries] == [*([0] * 9), 1, 1, 2]
    assert (entries[4]["input_sizes"], entries[4]["output_sizes"]) == ([[2, 3]], [[4, 3]])
    assert all(entry["process_group"] == [name, "tp"] for entry in entries)
    assert {entry["frames"][0]["name"] for entry in entries} == {"test_all_calls_are_recorded"}
    assert record["hypercomm"]["counts"][name] == {"": 9, "send 1->0": 2, "recv 0->1": 1}
    assert record["hypercomm"]["layouts"].keys() == {"", "expert"}


# The last 500 calls are kept, with their sequence numbers, and so is the oldest call of each group
# that has not ended, because a rank may wait in it. Other calls are only counted. No call of the
# fake backend ends.
def test_last_calls_are_kept(grid, tmp_path):
    tp, dp = grid.create_pgs(["tp", "dp"])
    with grid.watch(60, tmp_path):
        dist.barrier(group=dp)
        dist.send(torch.ones(1), 4, group=tp)
        for _ in range(530):
            dist.barrier(group=tp)
        dist.send(torch.ones(1), 4, group=tp)
    record = read_folder(tmp_path).ranks[5]
    by_title = {group.title: group for group in record.groups}
    numbers = [call.number for call in record.lanes[by_title["tp"], ""]]
    assert numbers == [1, *range(32, 531)]
    assert [call.number for call in record.lanes[by_title["tp"], "send 1->0"]] == [2]
    assert record.counts[by_title["dp"], ""] == 1


# A signal handler makes a collective while a call is recorded. Nothing hangs, and every call has
# its own number. The handler runs at random places, about 1,000 times.
def test_signal_handler_makes_a_call(grid, tmp_path):
    tp = grid.create_pg("tp")
    made = []

    def handler(*_):
        made.append(dist.barrier(group=tp))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with grid.watch(60, tmp_path) as watch:
            signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
            own = 0
            while len(made) < 1000:
                dist.all_reduce(torch.ones(4), group=tp)
                own += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    record = json.loads(watch.file.read_text())
    numbers = [entry["collective_seq_id"] for entry in record["entries"]]
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) == own + len(made)


# A watch does not grow with the number of message tags. Messages with further tags are recorded,
# and no rank is blamed for them.
def test_tags_do_not_accumulate(grid, tmp_path):
    tp = grid.create_pg("tp")
    with grid.watch(60, tmp_path) as watch:
        for tag in range(3000):
            dist.send(torch.ones(1), 4, group=tp, tag=tag)
    record = json.loads(watch.file.read_text())
    (counts,) = (counts for counts in record["hypercomm"]["counts"].values() if counts)
    assert len(counts) <= 1001
    assert sum(counts.values()) == 3000
    assert record["entries"][-1]["profiling_name"] == "fake:send 1->0 tag 2999"
    evidence = read_folder(tmp_path)
    (group,) = (group for group in evidence.ranks[5].groups if group.title == "tp")
    assert not evidence.has_channels(5, group)


# If no call completes for a while, the watch writes its file. Once calls complete again, it removes
# the file. Groups that were destroyed are not in the file.
def test_file_is_written_while_calls_hang(grid, tmp_path):
    tp, dp = grid.create_pgs(["tp", "dp"])
    with grid.watch(0.05, tmp_path) as watch:
        while not watch.file.exists():
            pass
        assert reason_of(watch) == "has not moved for 0.05 s"
        while watch.file.exists():
            dist.barrier(group=tp)
        dist.destroy_process_group(dp)
    assert reason_of(watch) == "left the watch"
    watch.stop()
    groups = json.loads(watch.file.read_text())["pg_config"].values()
    assert [group["desc"] for group in groups] == ["tp", "default_pg"]


# An exception is recorded in the file and propagates.
def test_exception_is_recorded(grid, tmp_path):
    with pytest.raises(KeyError), grid.watch(60, tmp_path) as watch:
        raise KeyError("planted")
    assert reason_of(watch) == "raised KeyError: 'planted'"


# Invalid arguments raise, and so does a second watch, or a watch without a job. Nothing is
# replaced, and nothing is written.
def test_invalid_watches(grid, tmp_path):
    before = methods_of_process_group()
    message = "seconds= must be a number above 0 and at most 1e6, got .*; pass a number, as in"
    for seconds in (0, -1, float("nan"), float("inf"), timedelta(seconds=60), "60"):
        with pytest.raises(ToolError, match=message):
            grid.watch(seconds, tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolError, match=r"cannot write to the folder '.*/file'"):
        grid.watch(1, tmp_path / "file")
    with pytest.raises(ToolError, match=r"/new/er'.*; only the last folder of the path is created"):
        grid.watch(1, tmp_path / "new" / "er")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    watch = grid.watch(1, tmp_path / "new")
    with pytest.raises(ToolError, match="this process already has a watch, which writes /"):
        grid.watch(1, tmp_path)
    watch.stop()
    assert methods_of_process_group() == before
    dist.destroy_process_group()
    with pytest.raises(NotInitializedError):
        grid.watch(1, tmp_path)


# torch's trace analyser finds no mistake in the collectives of four ranks. In torch 2.10, the
# analyser knows only NCCL's names of collectives, so the records get these names.
@pytest.mark.filterwarnings("ignore:`torch.distributed.:FutureWarning")
def test_torchs_analyser_reads_the_files(tmp_path):
    from torch.distributed.flight_recorder import fr_trace

    for rank in range(4):
        with fake_world(4, rank=rank), HyperCommGrid("tp=2,dp=2") as grid:
            groups = grid.create_pgs(["tp", "dp"])
            with grid.watch(60, tmp_path / "watch") as watch:
                for group in groups:
                    dist.all_reduce(torch.ones(4), group=group)
                    dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=group)
                    dist.barrier(group=group)
        text = (
            watch.file.read_text().replace('"fake:', '"nccl:').replace('"started"', '"completed"')
        )
        record = json.loads(text.replace(":barrier", ":all_reduce_barrier"))
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(record))
    fr_trace.main([str(tmp_path), "-p", "trace_", "-o", str(tmp_path / "found")])
    _, found = pickle.loads((tmp_path / "found").read_bytes())
    assert {call.pg_desc.rpartition(":")[2] for call in found.collectives} == {"tp", "dp"}
    assert len(found.collectives) == 12
    assert all(call.pass_check for call in found.collectives)
