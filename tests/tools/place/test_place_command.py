"""`hypercomm place`: its arguments, output, files and exit code."""

import json

import pytest

pytestmark = pytest.mark.torch_free

NVL72 = ["place", "tp=4,dp=16,pp=4", "--on", "4,72", "--traffic", "tp=40G,dp=6G,pp=100M"]
SWAPPED = ["place", "dp=4,tp=2", "--on", "2"]


# --json prints one JSON object and nothing else.
def test_json(in_process):
    found = json.loads(in_process(*NVL72, "--json", "--overlap", "dp").stdout)
    assert found["traffic"]["pp"]["pattern"] == "chain"
    assert found["traffic"]["dp"]["overlapped"] is True
    assert json.loads(in_process(*SWAPPED, "--json").stdout)["better"]["layout"] == "tp=2,dp=4"
    more = json.loads(in_process(*SWAPPED, "--json", "--groups", "dp+tp").stdout)
    assert ["dp", "tp"] in [row["dims"] for row in more["groups"]]


# Files that exist are kept, and then nothing is printed.
def test_write(in_process, tmp_path):
    path = tmp_path / "ranks"
    call = [*SWAPPED, "--write", "rankfile", str(path)]
    assert in_process(*call).returncode == 0
    assert path.read_text().startswith("rank 0=host0 slot=0\nrank 1=host0 slot=1\n")
    again = in_process(*call)
    assert (again.returncode, again.stdout) == (2, "")
    assert "exists, and is kept" in again.stderr
    path.write_text("")
    assert in_process(*call, "--force").returncode == 0
    assert path.read_text().count("\n") == 8
