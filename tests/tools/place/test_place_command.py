"""`hypercomm place`: its arguments, output and exit code."""

import json

import pytest

pytestmark = pytest.mark.torch_free

NVL72 = ["place", "tp=4,dp=16,pp=4", "--on", "4,72", "--traffic", "tp=40G,dp=6G,pp=100M"]
SWAPPED = ["place", "dp=4,tp=2", "--on", "2"]


# --json prints one JSON object and nothing else.
def test_json_output(in_process):
    found = json.loads(in_process(*NVL72, "--json", "--overlap", "dp").stdout)
    assert found["traffic"]["pp"]["pattern"] == "chain"
    assert found["traffic"]["dp"]["overlapped"] is True
    assert json.loads(in_process(*SWAPPED, "--json").stdout)["better"]["layout"] == "tp=2,dp=4"
    hosts = [word for host in "abab" for word in ("--on", host)]
    listed = json.loads(in_process("place", "tp=2,dp=2", *hosts, "--json").stdout)
    assert listed["reordered"]["rank_list"] == [0, 2, 1, 3]
    assert "ranks=[0, 2, 1, 3]" in listed["reordered"]["advice"]
    assert found["reordered"] is None
    more = json.loads(in_process(*SWAPPED, "--json", "--groups", "dp+tp").stdout)
    assert ["dp", "tp"] in [row["dims"] for row in more["groups"]]
