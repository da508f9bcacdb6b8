"""A watch in one process: what it writes down, what it leaves as it was, and what it refuses."""

import json

import pytest
import torch
import torch.distributed as dist
from tools.blame.dumps import blame

from hypercomm import HyperCommGrid
from hypercomm.errors import NotInitializedError, ToolError
from hypercomm.testing import fake_world
from hypercomm.tools.blame.reading import read_folder


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
    (name,) = (name for name, group in record["pg_config"].items() if group["desc"] == "tp")
    assert record["pg_config"][name]["ranks"] == "[4, 5]"
    entries = record["entries"]
    names = ["all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base"]
    names += ["_reduce_scatter_base", "reduce_scatter", "all_to_all_single", "barrier"]
    names += ["send 1->0", "recv 1<-0", "send 1->0"]
    assert [entry["profiling_name"] for entry in entries] == [f"fake:{name}" for name in names]
    assert [entry["collective_seq_id"] for entry in entries] == [*range(1, 10), 0, 0, 0]
    assert [entry["p2p_seq_id"] for entry in entries] == [0] * 9 + [1, 1, 2]
    assert (entries[0]["input_sizes"], entries[0]["input_dtypes"]) == ([[2, 3]], ["float32"])
    assert (entries[4]["input_sizes"], entries[4]["output_sizes"]) == ([[2, 3]], [[4, 3]])
    assert all(entry["process_group"] == [name, "tp"] for entry in entries)
    assert {entry["frames"][0]["name"] for entry in entries} == {"test_all_calls"}
    assert record["hypercomm"]["counts"][name] == {"": 9, "send 1->0": 2, "recv 0->1": 1}
    assert record["hypercomm"]["layouts"].keys() == {"", "expert"}
    assert methods() == before
    dist.barrier(group=tp)  # torch's own method, bound as before


# The last 500 calls are kept, with their numbers; of all others it is known how many there were.
def test_ring(grid, tmp_path):
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
    assert numbers == [*range(32, 531)]
    assert [call.number for call in record.lanes[by_title["tp"], "send 1->0"]] == [2]
    assert record.counts[by_title["dp"], ""] == 1


# It writes when nothing moves, and what it wrote goes once something does.
def test_standstill(grid, tmp_path):
    tp = grid.create_pg("tp")
    with grid.watch(0.05, tmp_path) as watch:
        while not watch.file.exists():
            pass
        assert json.loads(watch.file.read_text())["hypercomm"]["why"] == "has not moved for 0.05 s"
        while watch.file.exists():
            dist.barrier(group=tp)
    assert json.loads(watch.file.read_text())["hypercomm"]["why"] == "left the watch"
    watch.stop()


# An exception is in the file, and goes on.
def test_exception(grid, tmp_path):
    with pytest.raises(KeyError), grid.watch(60, tmp_path) as watch:
        raise KeyError("planted")
    assert json.loads(watch.file.read_text())["hypercomm"]["why"] == "raised KeyError: 'planted'"


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e9])
def test_bad_seconds(grid, tmp_path, seconds):
    with pytest.raises(ToolError, match="seconds must be above 0 and at most 1e6, got"):
        grid.watch(seconds, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_bad_folders(grid, tmp_path):
    before = methods()
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolError, match=r"cannot write to the folder '.*/file': File exists"):
        grid.watch(1, tmp_path / "file")
    watch = grid.watch(1, tmp_path / "new" / "er")
    with pytest.raises(ToolError, match="this process has a watch, which writes /"):
        grid.watch(1, tmp_path)
    watch.stop()
    assert methods() == before


# The files of jobs of two sizes in one folder: refused, with a file of each.
def test_two_jobs(tmp_path):
    for rank, size in ((1, 4), (2, 8)):
        with fake_world(size, rank=rank), HyperCommGrid("tp=2,dp=-1") as grid:
            grid.watch(60, tmp_path).stop()
    words = "hypercomm_watch_1.json and hypercomm_watch_2.json are of two jobs; keep the dumps of"
    with pytest.raises(ToolError, match=words):
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
    groups = json.loads(watch.file.read_text())["pg_config"].values()
    assert [group["desc"] for group in groups] == ["tp", "default_pg"]


# A skip among the calls that are kept is found, after others were lost.
@pytest.mark.parametrize("times", [1, 3])
def test_order_after_a_turned_ring(tmp_path, times):
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
        for entry in record["entries"]:  # which do not end in a fake world
            number = entry["process_group"][1], entry["collective_seq_id"]
            entry["state"] = "started" if (rank, *number) == (3, "dp", 150) else "completed"
        watch.file.write_text(json.dumps(record))
    verdict = blame(tmp_path)
    assert [(f.kind, f.culprits) for f in verdict.findings] == [("order", (1,))]
    assert f"calls all_reduce number {141 * times + 1} of tp (ranks 0..1)" in str(verdict)
