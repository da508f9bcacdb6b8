"""A watch in one process: what it writes down, what it leaves as it was, and what it refuses."""

import json

import pytest
import torch
import torch.distributed as dist

from hypercomm import DumpError, HyperCommGrid, NotInitializedError, WatchError
from hypercomm.testing import fake_world
from hypercomm.tools.blame import watch as watch_module
from hypercomm.tools.blame.verdict import blame


@pytest.fixture
def grid():
    with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4") as made:
        made.register_view("expert", [4, 2], ["ep", "edp"])
        yield made


def methods():
    return dict(vars(dist.ProcessGroup))


# Every call of torch.distributed that communicates is seen, with its name, shapes and dtype.
@pytest.mark.filterwarnings("ignore:`torch.distributed.:FutureWarning")
def test_all_calls(grid, tmp_path):
    before, one, pair = methods(), torch.ones(2, 3), [torch.ones(1), torch.ones(1)]
    tp = grid.create_pg("tp")
    with grid.watch(60, tmp_path) as watch:
        assert methods() != before
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
    record = json.loads(watch.file.read_text())
    (group,) = record["groups"]
    assert (group["dims"], group["ranks"], group["title"]) == (["tp"], [4, 5], "tp")
    calls = group["calls"]
    assert [(call["op"], call["number"]) for call in calls] == [
        ("all_reduce", 1),
        ("broadcast", 2),
        ("reduce", 3),
        ("all_gather", 4),
        ("all_gather_into_tensor", 5),
        ("reduce_scatter_tensor", 6),
        ("reduce_scatter", 7),
        ("all_to_all_single", 8),
        ("barrier", 9),
        ("send", 1),
        ("recv", 1),
        ("send", 2),
    ]
    assert calls[0]["shapes"] == [[2, 3]]
    assert calls[0]["dtypes"] == ["float32"]
    assert [call.get("peer") for call in calls[-3:]] == [4, 4, 4]
    assert all("test_watch.py:" in call["where"] for call in calls)
    assert all(call["where"].endswith(" in test_all_calls") for call in calls)
    assert record["layouts"].keys() == {"", "expert"}
    assert methods() == before
    dist.barrier(group=tp)  # torch's own method, bound as before


# The last 100 of each group are kept, and their numbers go on.
def test_ring(grid, tmp_path):
    tp = grid.create_pg("tp")
    with grid.watch(60, tmp_path) as watch:
        for _ in range(130):
            dist.barrier(group=tp)
    (group,) = json.loads(watch.file.read_text())["groups"]
    assert [call["number"] for call in group["calls"]] == [*range(31, 131)]


# It writes when nothing moves, and what it wrote goes once something does.
def test_standstill(grid, tmp_path):
    tp = grid.create_pg("tp")
    with grid.watch(0.05, tmp_path) as watch:
        while not watch.file.exists():
            pass
        assert json.loads(watch.file.read_text())["why"] == "has not moved for 0.05 s"
        while watch.file.exists():
            dist.barrier(group=tp)
    assert json.loads(watch.file.read_text())["why"] == "left the watch"
    watch.stop()
    assert watch.is_over


# An exception is in the file, and goes on.
def test_exception(grid, tmp_path):
    with pytest.raises(KeyError), grid.watch(60, tmp_path) as watch:
        raise KeyError("planted")
    assert json.loads(watch.file.read_text())["why"] == "raised KeyError: 'planted'"


@pytest.mark.parametrize("seconds", [0, -1, True, "1", None, float("nan"), float("inf"), 1e9])
def test_bad_seconds(grid, tmp_path, seconds):
    with pytest.raises(WatchError, match="seconds must be a number above 0, at most 1,000,000"):
        grid.watch(seconds, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_bad_folders(grid, tmp_path):
    before = methods()
    (tmp_path / "file").write_text("")
    with pytest.raises(WatchError, match=r"cannot write to the folder '.*/file': File exists"):
        grid.watch(1, tmp_path / "file")
    for folder in (None, 3, "", "a\0b"):
        with pytest.raises(WatchError, match="folder must be the path of a folder"):
            grid.watch(1, folder)
    with grid.watch(1, tmp_path / "new" / "er") as watch:
        with pytest.raises(WatchError, match="this process has a watch, which writes /"):
            grid.watch(1, tmp_path)
        assert not watch.is_over
    assert methods() == before


# The files of two jobs in one folder: refused, with a file of each.
def test_two_jobs(tmp_path):
    for rank in (1, 2):
        with fake_world(4, rank=rank), HyperCommGrid("tp=2,dp=2") as grid:
            grid.watch(60, tmp_path).stop()
    words = "hypercomm_watch_1.json and hypercomm_watch_2.json are of two jobs; keep the dumps of"
    with pytest.raises(DumpError, match=words):
        blame(tmp_path)


def test_without_a_job(tmp_path):
    with fake_world(4):
        grid = HyperCommGrid("tp=2,dp=2")
    with pytest.raises(NotInitializedError):
        grid.watch(1, tmp_path)
    grid.destroy()


# A group that its user has destroyed is left out; the program hears nothing of it.
def test_a_destroyed_group(grid, tmp_path):
    tp, dp = grid.create_pgs(["tp", "dp"])
    with grid.watch(60, tmp_path) as watch:
        dist.all_reduce(torch.ones(1), group=tp)
        dist.destroy_process_group(dp)
    assert [group["title"] for group in json.loads(watch.file.read_text())["groups"]] == ["tp"]


# A watch keeps the last 100 calls of each group: a skip among them is found, after thousands.
@pytest.mark.parametrize("times", [1, 3])
def test_order_after_a_turned_ring(tmp_path, times, monkeypatch):
    monkeypatch.setattr(watch_module, "_identity", lambda _here: "one job")
    for rank in range(4):
        with fake_world(4, rank=rank), HyperCommGrid("tp=2,dp=2") as grid:
            tp, dp = grid.create_pgs(["tp", "dp"])
            with grid.watch(60, tmp_path) as watch:
                for step in range(150):
                    for _ in range(times):
                        dist.all_reduce(torch.ones(1), group=tp)
                    if (rank, step) != (1, 140):
                        dist.all_reduce(torch.ones(1), group=dp)
        record = json.loads(watch.file.read_text())
        for group in record["groups"]:
            for call in group["calls"]:  # which do not end in a fake world
                waits = (rank, group["title"], call["number"]) == (3, "dp", 150)
                call["state"] = "started" if waits else "finished"
        watch.file.write_text(json.dumps(record))
    verdict = blame(tmp_path)
    assert [(f.kind, f.culprits) for f in verdict.findings] == [("order", (1,))]
    assert f"calls all_reduce number {141 * times + 1} of tp (ranks 0..1)" in str(verdict)
