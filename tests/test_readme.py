"""What the README says: its examples run, and its commands are those that CI runs."""

import doctest
import os
import re
import subprocess
from pathlib import Path

import pytest

from hypercomm.compat.megatron import version

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


# Every example that shows its output prints just that, where no older megatron-core is installed.
@pytest.mark.long
def test_examples():
    with version.use(version.text_of(version.NEWEST)):
        failures, attempted = doctest.testfile(str(README), module_relative=False)
    assert (failures, attempted > 10) == (0, True)


# The program that builds a grid runs as it stands, under torchrun, on 8 ranks, to the end.
@pytest.mark.clients
def test_program(tmp_path):
    (program,) = re.findall(r"```python\n(import torch.*?)```", README.read_text(), re.DOTALL)
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run(
        ["torchrun", "--nproc-per-node", "8", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        # buffered, so that a rank's lines are not torn by another's
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
    )
    assert done.returncode == 0, done.stderr
    for rank in range(8):
        place = f"tp={rank % 2}, cp={rank // 2 % 2}, dp={rank // 4}"
        assert f"  this is rank {rank}, at {place}\n" in done.stdout
    for group in ("cp+dp: 2 of 4", "tp: 4 of 2", "dp (gloo): 4 of 2"):
        assert done.stdout.count(f"  group {group} ranks") == 8


# The commands that set everything up stand at the top, and CI takes them from there.
def test_commands():
    commands = [line.split("#")[0].strip() for line in README.read_text().splitlines()[:12]]
    assert "pip install '.[cli]' && hypercomm check tp=2,cp=2,dp=2" in commands
    assert "pip install '.[cli,test]' && pytest" in commands
    assert "pip install '.[cli,test]' && pytest -m slow" in commands
    asked = re.findall(r'readme_command "(.+)"', (ROOT / ".ci" / "run").read_text())
    assert len(asked) == 4
    assert all(any(line.startswith(command) for line in commands) for command in asked)
