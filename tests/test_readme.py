"""What the README says: its examples run, and its commands are those that CI runs."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import page_runner
import pytest

from hypercomm.compat.megatron import version

pytestmark = pytest.mark.any_torch  # gloo of torch 2.10 prints a line for each group

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def program_of(begin):
    """The one program of the README that begins so."""
    found = re.findall(rf"```python\n({begin}.*?)```", README.read_text(), re.DOTALL)
    assert len(found) == 1
    return found[0]


# Every example that shows its output prints just that, where no older megatron-core is installed.
@pytest.mark.long
def test_examples():
    with version.use(".".join(map(str, version.NEWEST))):
        failures, attempted = doctest.testfile(str(README), module_relative=False)
    assert (failures, attempted > 10) == (0, True)


# The program that builds a grid runs as it stands, under torchrun, on 8 ranks, to the end.
@pytest.mark.clients
def test_program(tmp_path):
    program = program_of("import torch\n\nimport hypercomm")
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


# Every other block of the README does what it says.
@pytest.mark.long
def test_blocks(tmp_path):
    assert page_runner.run_page(README, tmp_path) >= 2


# The property test finds the bug, and shrinks it to the job that the README shows.
@pytest.mark.long
def test_property_test(tmp_path):
    program = program_of("import torch\n\nfrom hypercomm.testing")
    (tmp_path / "test_layer.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_layer.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^rank [01] failed: ", done.stdout, re.MULTILINE), done.stdout
    assert "AssertionError: Tensor-likes are not close!" in done.stdout
    assert "grid=HyperCommGrid(tp=2): ranks 0..1 of a world of 2" in done.stdout


# The commands that set everything up stand at the top, and CI takes them from there.
def test_commands():
    commands = [line.split("#")[0].strip() for line in README.read_text().splitlines()[:12]]
    assert "pip install '.[cli]' && hypercomm check tp=2,cp=2,dp=2" in commands
    assert "pip install '.[cli,test]' && pytest" in commands
    assert "pip install '.[cli,test]' && pytest -m slow" in commands
    asked = re.findall(r'readme_command "(.+)"', (ROOT / ".ci" / "run").read_text())
    assert len(asked) == 4
    assert all(any(line.startswith(command) for line in commands) for command in asked)
