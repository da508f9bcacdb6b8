"""Test that the examples run unchanged on real ranks, and print the right numbers."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import run_python

EXAMPLES = Path(__file__).parent.parent / "examples"

# The largest difference from the model on one process, in float32 after a few steps. Loaded
# checkpoints are identical, and so are Megatron's losses before and after install().
TOLERANCES = {
    "checkpoint_on_another_shape": 0,
    "compiled_all_reduce": 1e-5,
    "data_parallel": 1e-5,
    "deepspeed_pipeline": 1e-4,
    "deepspeed_zero": 1e-4,
    "dtensor_redistribute": 1e-5,
    "elastic_restart": 1e-5,
    "fsdp_and_tensor_parallel": 1e-5,
    "megatron_gpt": 0,
    "mixture_of_experts": 1e-5,
    "ported_megatron": 1e-5,
    "refit_llama": 1e-6,
    "reinforcement_actors": 0,
    "reinforcement_weights": 0,
    "renew_world": 1e-12,
    "ring_attention": 1e-4,
    "sharded_layer": None,  # its ranks compare the values
    "survivors": 1e-12,
    "survivors_in_place": 1e-12,
    "three_d_training": 1e-5,
    "trainer_and_engine": None,  # its engine compares the values
}
LOSES_RANKS = {
    "elastic_restart",
    "renew_world",
    "survivors",
    "survivors_in_place",
    "trainer_and_engine",
}
"""Examples in which a slow rank would count as lost."""
PRINTS = {
    "elastic_restart": [
        "rank 2 failed: killed by signal 9 (SIGKILL)\n",
        "tp=1,dp=3, from step 3 on: ",
    ],
    "renew_world": [
        "gpu=2,host=2, without ranks 2..3 (no other rank has host=1); rank 5 is 3; leaves: [2]\n",
        "\nexit codes: [0, 0, 0, -9, 0, 0]\n",
    ],
    "survivors": ["tp=2,dp=3, without ranks 4..5 (no other rank has dp=2); spare: ranks [4]\n"],
    "sharded_layer": ["    grid=HyperCommGrid(tp=2): ranks 0..1 of a world of 2,\n    batch=1,\n"],
    "trainer_and_engine": [
        "the first engine ended with [-9, -9]\n",
        "the engine has received 10 rounds of weights in two lives\n",
    ],
}
ARGUMENTS = {"megatron_gpt": ["--out", "losses.png"]}


def test_all_examples_are_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(TOLERANCES)


@pytest.mark.clients
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.alone] if name in LOSES_RANKS else [])
        for name in TOLERANCES
    ],
)
def test_example(name, tmp_path):
    script = [EXAMPLES / f"{name}.py", *ARGUMENTS.get(name, [])]
    # This limit is longer than the limit of run_ranks, which reports the stacks of all ranks.
    variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = run_python(*script, folder=tmp_path, seconds=330, **variables)
    if name == "survivors_in_place" and not hasattr(dist, "_reconfigure"):
        assert "cannot reconfigure process groups; 2.14 can" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    figures = dict(re.findall(r"^([a-z][a-z ]*): (\S+)$", done.stdout, re.MULTILINE))
    if TOLERANCES[name] is not None:
        assert float(figures.pop("largest difference")) <= TOLERANCES[name]
    for groups in ("process groups added", "process groups left"):
        assert figures.pop(groups, "0") == "0"
    if name == "compiled_all_reduce":
        assert figures.pop("graphs") == "1"
    for text in PRINTS.get(name, []):
        assert text in done.stdout
    if name == "survivors_in_place":
        check_same_groups(done.stdout)
    if name == "sharded_layer":
        assert float(figures.pop("seconds to find and shrink it")) < 60
    if name == "megatron_gpt":
        check_megatron_gpt(done.stdout)
        assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert not figures


def check_same_groups(printed):
    """Check that each wrapper continues within seconds and keeps its process groups."""
    for kind in ("DDP", "FSDP2"):
        assert f"{kind} has the same groups: True\n" in printed
        [took_s] = re.findall(
            rf"^{kind} continues as shard=2,dp=2 after (.*) s$", printed, re.MULTILINE
        )
        assert float(took_s) < 3


def check_megatron_gpt(printed):
    """Check the parallel states, that both runs are identical, and that the loss falls."""
    assert "before install() Megatron runs on megatron.core.parallel_state\n" in printed
    assert "after install() Megatron runs on hypercomm.compat.megatron.parallel_state\n" in printed
    assert "bit-identical losses: 80 of 80\n" in printed
    assert "bit-identical weights: on 8 of 8 ranks\n" in printed
    for model in ("dense", "experts"):
        losses = re.findall(rf"^{model}: .*? +\d+ +(\d\.\d{{4}}) ", printed, re.MULTILINE)
        assert len(losses) == 5
        assert float(losses[0]) > 2.5  # the loss of guessing is log(14)
        assert float(losses[-1]) < 1


# The compared losses change from step to step, so comparing them shows something.
@pytest.mark.clients
@pytest.mark.parametrize("name", ["fsdp_and_tensor_parallel", "data_parallel"])
def test_losses_change(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.Block() if hasattr(example, "Block") else example.model_of(0)
    losses = [loss.item() for loss in example.train(model, example.data())]
    assert len(set(losses)) == len(losses) == 5
    assert losses[-1] < losses[0]
