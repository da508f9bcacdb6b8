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


# A node list does not contain the number of GPUs per host. The report says which number was
# assumed, and how to specify it. If the number is specified, or is in a hostfile, nothing is
# assumed.
def test_gpus_per_host_that_are_assumed(in_process, tmp_path):
    sizes = ("place", "tp=8,dp=32,pp=4")
    text = in_process(*sizes, "--on", "node[1-4]").stdout
    assert "256 GPUs per host: the node list 'node[1-4]' gives no number, so 1,024 ranks" in text
    assert "give the number, as in --on 8\n" in text
    notes = json.loads(in_process(*sizes, "--on", "node[1-4]", "--json").stdout)["notes"]
    assert sum("as in --on 8" in note for note in notes) == 1
    (tmp_path / "hosts").write_text("".join(f"node{at} slots=256\n" for at in range(4)))
    for on in (["node[1-4]", "256"], [str(tmp_path / "hosts")], ["256"]):
        words = [word for one in on for word in ("--on", one)]
        assert "gives no number" not in in_process(*sizes, *words).stdout


# On a machine without named hosts, --world-size determines a size that is -1.
def test_world_size(in_process):
    on = ("--on", "8", "--json")
    given = in_process("place", "tp=8,dp=-1", "--world-size", "64", *on).stdout
    assert json.loads(given) == json.loads(in_process("place", "tp=8,dp=8", *on).stdout)
