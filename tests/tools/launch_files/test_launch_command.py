"""Test the commands plan, place, draw and diff on launch files."""

import json

import pytest

FLAGS = (
    "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
)
RUN = f"torchrun --nnodes 2 --nproc-per-node 4 train.py {FLAGS}\n"


@pytest.fixture
def run(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(RUN)
    return str(file)


def test_plan_of_a_launch_file(run, in_process):
    done = in_process("plan", run, "--rank", "5", "--groups", "tp,dp,ep")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"{run}: Megatron-LM; 8 ranks"
    size = ["training.tp", "2", "run.sh:1", "--tensor-model-parallel-size", "2"]
    assert size in [line.split() for line in lines]
    assert "tp=2,cp=1,dp=4,pp=1: 8 ranks 0..7; the first dim varies fastest" in lines
    assert "2 hosts of 4; rank 5 is at tp=1, cp=0, dp=2, pp=0" in lines  # the file gives the hosts
    rows = {
        line.split()[0]: line.split()[1:] for line in lines if line.startswith(("dp ", "expert:ep"))
    }
    assert rows["dp"] == ["2", "4", "2", "2", "1", "3", "5", "7"]
    assert rows["expert:ep"] == ["2", "4", "1", "1", "4", "5", "6", "7"]
    assert "4 hosts of 2" in in_process("plan", run, "--on", "2").stdout


def test_plan_as_json(run, in_process):
    found = json.loads(in_process("plan", run, "--json").stdout)
    assert list(found) == ["framework", "world_size", "layouts", "sources", "problems"]
    assert (found["framework"], found["world_size"], found["problems"]) == ("Megatron-LM", 8, [])
    assert found["layouts"] == {
        "training": "tp=2,cp=1,dp=4,pp=1",
        "training:expert": "expt_tp=1,ep=4,expt_dp=2,pp=1",
    }
    tp = found["sources"]["training.tp"]
    assert (tp["value"], tp["file"], tp["line"]) == (2, "run.sh", 1)


# Problems are printed, and the exit code is 1. --world-size specifies a number of ranks that the
# file lacks.
def test_problems_are_printed(tmp_path, in_process):
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  tensor_model_parallel_size: 3\n")
    done = in_process("plan", str(file))
    assert done.returncode == 1
    assert "problem: training: the number of ranks is not given" in done.stdout
    done = in_process("plan", str(file), "--world-size", "8")
    assert done.returncode == 1
    assert "for example 6 or 9; the world has 8; tp=2 would fit" in done.stdout
    done = in_process("draw", str(file), "--world-size", "6")
    assert done.returncode == 0
    assert "tp=3,cp=1,dp=2,pp=1  6 ranks" in done.stdout


# Each module has a table. diff compares the modules of two files, or of a file and sizes.
def test_diff_and_modules(tmp_path, run, in_process):
    file = tmp_path / "verl.sh"
    file.write_text(
        "python -m verl.trainer actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.n_gpus_per_node=8\n"
    )
    found = in_process("plan", str(file)).stdout
    assert "\nactor\ntp=4,cp=1,dp=2,pp=1: 8 ranks" in found
    assert "\nrollout\ntp=2,pp=1,dp=1,engines=4: 8 ranks" in found
    done = in_process("diff", run, "tp=4,dp=2")
    assert "tp=2,cp=1,dp=4,pp=1 to tp=4,dp=2: " in done.stdout
    other = tmp_path / "other.sh"
    other.write_text(RUN.replace("size 2", "size 4"))
    done = in_process("diff", run, str(other))
    assert "tp=2,cp=1,dp=4,pp=1 to tp=4,cp=1,dp=2,pp=1: " in done.stdout


def test_place_and_draw(run, tmp_path, in_process):
    done = in_process("place", run, "--on", "4,8")
    assert "tp=2,cp=1,dp=4,pp=1: 8 ranks on 2 hosts, 1 domain" in done.stdout
    picture = tmp_path / "picture.svg"
    done = in_process("draw", run, "-o", str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_text().startswith("<svg")
    assert "tp=2,cp=1,dp=4,pp=1  8 ranks on 2 hosts" in in_process("draw", run).stdout


def test_missing_launch_file(in_process):
    done = in_process("plan", "scripts/nope.sh")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'scripts/nope.sh' cannot be read as text" in done.stderr
