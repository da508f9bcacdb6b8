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


# The dims of a view may be selected in place and draw, as in plan.
def test_groups_of_views_in_every_command(run, in_process):
    done = in_process("place", run, "--on", "2", "--groups", "ep+expt_dp,tp+dp")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split()[:5] for line in done.stdout.splitlines()]
    assert ["expert:ep+expt_dp", "host", "1", "of", "1"] in rows
    assert ["tp+dp", "host", "1", "of", "1"] in rows
    drawn = in_process("draw", run, "--groups", "ep").stdout
    assert "ep    2 groups of 4, each inside one host   NVLink" in drawn
    view = ("--view", "expert:ep=4,rest=-1", "--groups", "ep")
    assert "2 groups of 4, each inside one host" in in_process("draw", "tp=2,dp=4", *view).stdout
    placed = in_process("place", "tp=2,dp=4", "--on", "4", *view).stdout
    assert "expert:ep    host   0 of 2  1" in placed
    for command in ("plan", "draw", "place"):
        on = ("--on", "8") if command == "place" else ()
        done = in_process(command, run, *on, "--groups", "pe")
        assert done.returncode == 2
        assert "view expert (expt_tp=1,ep=4,expt_dp=2,pp=1 sharing pp)" in done.stderr
        assert "did you mean 'ep'?" in done.stderr
    done = in_process("draw", run, run)  # a change has no views
    assert done.returncode == 0, done.stderr


# draw shows the groups of the views without --groups, as plan does.
def test_views_are_drawn_by_default(in_process):
    drawn = in_process("draw", "tp=2,dp=4", "--view", "expert:ep=4,rest=-1").stdout
    rows = {line.split()[0]: line for line in drawn.splitlines() if " groups of " in line}
    assert list(rows) == ["tp", "dp", "ep", "rest"]
    assert "2 groups of 4" in rows["ep"]


# Modules without the dims of --groups are reported, if another module has these dims.
def test_groups_of_one_module(tmp_path, in_process):
    file = tmp_path / "rl.yaml"
    file.write_text(
        "policy:\n  dtensor_cfg: {tensor_parallel_size: 2}\n"
        "  generation:\n    vllm_cfg: {tensor_parallel_size: 4}\n"
        "cluster: {gpus_per_node: 8, num_nodes: 1}\n"
    )
    done = in_process("plan", str(file), "--groups", "dp_replicate")
    assert done.returncode == 0
    assert "\npolicy.generation\nunknown dim 'dp_replicate'" in done.stdout
    assert in_process("plan", str(file), "--groups", "unknown").returncode == 2


# Files without a common module cannot be compared.
def test_files_without_a_common_module(tmp_path, in_process):
    files = [tmp_path / "one.yaml", tmp_path / "other.sh"]
    files[0].write_text(
        "policy: {dtensor_cfg: {tensor_parallel_size: 2}}\ncluster: {gpus_per_node: 8}"
    )
    files[1].write_text("torchrun --nproc-per-node 8 t.py --tensor-model-parallel-size 2")
    assert "no module is in both files" in in_process("diff", *map(str, files)).stdout


# --set decides a branch, and --include lets a file outside the folder be read.
def test_set_and_include(tmp_path, in_process):
    (tmp_path / "job").mkdir()
    (tmp_path / "args.sh").write_text("SIZES=(--tensor-model-parallel-size $TP)\n")
    file = tmp_path / "job" / "run.sh"
    file.write_text(
        "case $1 in 7b) TP=2;; 70b) TP=8;; esac\nsource ../args.sh\n"
        "torchrun --nproc-per-node 8 pretrain_gpt.py ${SIZES[@]}\n"
    )
    done = in_process("plan", str(file))
    assert done.returncode == 1
    assert "run.sh:2 source ../args.sh is not read, and may set ${SIZES[@]}" in done.stdout
    included = ["--include", str(tmp_path)]
    done = in_process("plan", str(file), *included)
    assert done.returncode == 1
    assert "2 in line 1 or 8 in line 1 or" in done.stdout
    for argument, size in (("7b", 2), ("70b", 8)):
        done = in_process("plan", str(file), *included, "--set", f"1={argument}")
        assert done.returncode == 0, done.stdout
        assert f"tp={size},cp=1,dp={8 // size},pp=1" in done.stdout
    wrong = in_process("plan", str(file), "--set", "TP")
    assert wrong.returncode == 2
    assert "write NAME=VALUE" in wrong.stderr


# The help has paragraphs without the indentation of the docstrings.
@pytest.mark.parametrize("command", ["plan", "place", "draw", "diff"])
def test_help(command, in_process):
    text = in_process(command, "--help").stdout.partition("Options:")[0]
    assert "a launch file of Megatron" in text
    assert not [line for line in text.splitlines() if "  " in line.strip()]
