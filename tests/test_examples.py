"""The examples run as they are, on real ranks, and their figures hold."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"

# The largest difference to the model on one process, in float32 after a few steps; what was loaded
# from a checkpoint is the same to the bit.
TOLERANCES = {
    "checkpoint_on_another_shape": 0,
    "compiled_all_reduce": 1e-5,
    "data_parallel": 1e-5,
    "deepspeed_zero": 1e-4,
    "dtensor_redistribute": 1e-5,
    "fsdp_and_tensor_parallel": 1e-5,
}
MISSING = {
    "deepspeed_zero": (
        importlib.util.find_spec("deepspeed") is None,
        "deepspeed is not installed: the extra `test` brings it on Linux",
    ),
    "fsdp_and_tensor_parallel": (
        not hasattr(torch.cpu.Stream, "record_event"),
        "this torch cannot run FSDP2 on a CPU",
    ),
}


def test_all_are_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(TOLERANCES)


@pytest.mark.clients
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                MISSING.get(name, (False, ""))[0], reason=MISSING.get(name, (False, "-"))[1]
            ),
        )
        for name in TOLERANCES
    ],
)
def test_example(name):
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    figures = dict(re.findall(r"^([a-z ]+): (\S+)$", done.stdout, re.MULTILINE))
    assert float(figures.pop("largest difference")) <= TOLERANCES[name]
    for groups in ("process groups added", "process groups left"):
        assert figures.pop(groups, "0") == "0"
    if name == "compiled_all_reduce":
        assert figures.pop("graphs") == "1"
    assert not figures


# The figure that is compared is one that training changes: losses differ from step to step.
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
