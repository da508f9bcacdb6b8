"""`--on live` in a real job: its ranks say where they are, and one of them speaks."""

import socket
import subprocess

import pytest
from launched import rank_free

pytestmark = pytest.mark.clients

HOST = socket.gethostname().partition(".")[0]
TORCHRUN = ["torchrun", "--nproc-per-node", "4", "--no-python", "hypercomm"]


def run(folder, *arguments):
    return subprocess.run(
        [*TORCHRUN, *arguments],
        cwd=folder,
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
        env=rank_free(),
    )


def test_place(tmp_path):
    done = run(tmp_path, "place", "tp=2,dp=2", "--on", "live")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tp=2,dp=2: 4 ranks on 1 host") == 1


# The open size is the job's, and the frame is the host's name.
def test_draw(tmp_path):
    done = run(tmp_path, "draw", "tp=2,dp", "--on", "live")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tp=2,dp=2\n") == 1
    assert HOST in done.stdout
    assert "tp: 2 groups of 2, each inside one host" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_draw_a_file(tmp_path):
    done = run(tmp_path, "draw", "tp=2,dp=2", "--on", "live", "-o", "grid.svg")
    assert done.returncode == 0, done.stderr
    assert f">{HOST}<" in (tmp_path / "grid.svg").read_text()
