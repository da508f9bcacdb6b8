"""Test descriptions of machines from each kind of source."""

import sys
import time

import numpy as np
import pytest

from hypercomm import read_topology
from hypercomm.errors import LayoutError, MissingPackageError
from hypercomm.tools.place import Level, Topology

pytestmark = pytest.mark.torch_free

RACKS = """
# the example of topology.conf(5), with other nodes
SwitchName=s0 Nodes=node[0-1] LinkSpeed=900
switchname=s1 nodes="node[2-3]"
SwitchName = s2 \\
    Switches=s[0-1]
"""
SCONTROL = """
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[0-1]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n2
SwitchName=top Level=1 LinkSpeed=1 Nodes=n[0-2] Switches=s[0-1]
"""
NVL72 = "BlockName=b1 Nodes=n[01-18]\nBlockName=b2 Nodes=n[19-36]\nBlockSizes=18,36\n"
SLURM_YAML = """
- topology: flat
  flat: true
- topology: nvl
  block:
    block_sizes: [2]
    blocks:
      - {block: b1, nodes: "node[01-04]"}
- topology: racks
  cluster_default: true
  tree:
    switches:
      - {switch: top, children: "s[1-2]"}
      - {switch: s1, nodes: "node[01-02]"}
      - {switch: s2, nodes: "node[03-04]"}
"""


@pytest.fixture
def write_file(tmp_path):
    """Return a function that writes a file and returns its path."""

    def write(name, text):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def units(topology):
    """Map each level to the names of the units of all ranks."""
    return {level.name: [level.names[unit] for unit in level.of_rank] for level in topology.levels}


# With sizes, rank r is on host r // 4 and in domain r // 8.
@pytest.mark.parametrize("on", ["4,8", "host=4,domain=8", " host=4 , domain=8 ", "domain=8,host=4"])
def test_sizes(on):
    topology = read_topology(on, 12)
    assert topology.names == ("host", "domain")
    for level, size in zip(topology.levels, (4, 8), strict=True):
        assert level.of_rank.tolist() == [rank // size for rank in range(12)]
    assert read_topology(4, 12) == read_topology("4", 12) == Topology(topology.levels[:1])


# Hostfiles of Open MPI, DeepSpeed and MPICH are read. Ranks fill hosts in the order of the file.
@pytest.mark.parametrize(
    "text",
    [
        "b slots=2\na slots=1\n",
        "# ours\n\nb   slots=2 max_slots=4\na slots=1 # last",
        "\ufeffb:2\r\na:1\r\n",
    ],
)
def test_hostfiles(write_file, text):
    assert units(read_topology(write_file("hosts", text))) == {"host": ["b", "b", "a"]}


# Node lists are expanded as slurm.conf(5) describes: ranges keep leading zeros, brackets multiply.
@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1,n2", ["n1", "n2"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
    ],
)
def test_node_lists(text, hosts):
    assert units(read_topology(text, 2 * len(hosts)))["host"] == list(np.repeat(hosts, 2))


# In a SLURM tree, the leaf is the switch of a node, and the spine is the parent of this switch.
# `scontrol show topology` lists the hosts of lower switches again at each higher switch. In an
# uneven tree, a short branch repeats its highest switch.
@pytest.mark.parametrize(
    ("text", "leaves", "spines"),
    [
        (RACKS, ["s0", "s0", "s1", "s1"], ["s2"] * 4),
        (SCONTROL, ["s0", "s0", "s1"], ["top"] * 3),
        (
            "SwitchName=a Nodes=x\nSwitchName=b Nodes=y\nSwitchName=t Switches=a\n",
            ["a", "b"],
            ["t", "b"],
        ),
    ],
)
def test_slurm_trees(write_file, text, leaves, spines):
    found = units(read_topology(write_file("topology.conf", text), len(leaves)))
    assert found["leaf"] == leaves
    assert found["spine"] == spines


# SLURM blocks are NVLink domains.
def test_slurm_blocks(write_file):
    topology = read_topology([write_file("topology.conf", NVL72), 4])
    assert topology.names == ("host", "domain")
    assert topology.level("domain").of_rank.tolist() == [rank // 72 for rank in range(144)]


# A topology.yaml may have several topologies. The default topology, or the only topology, is read.
def test_topology_yaml(write_file):
    topology = read_topology(write_file("topology.yaml", SLURM_YAML), 4)
    assert topology.names == ("host", "leaf", "spine")
    assert units(topology)["leaf"] == ["s1", "s1", "s2", "s2"]
    only = "- topology: nvl\n  block: {blocks: [{block: b1, nodes: 'n[1-4]'}]}\n"
    assert read_topology(write_file("topology.yml", only), 4).names == ("host", "domain")


# A list contains the host of each rank, or the host and GPU of each rank. The hosts can be in any
# order. Further sources add levels. If a level is given by a size, the size counts GPUs in the
# order of the hosts.
def test_list_of_hosts(write_file):
    hosts = ["b", "a", "c", "b", "a", "c", "a"]
    for on in (hosts, tuple(hosts)):
        topology = read_topology(on)
        assert units(topology) == {"host": hosts}
        assert topology.world_size == 7
        assert topology.gpus is None
    pairs = [("b", 1), ("a", 0), ("b", 0), ("a", 1)]
    topology = read_topology(pairs)
    assert units(topology)["host"] == ["b", "a", "b", "a"]
    assert topology.gpus == (1, 0, 0, 1)
    assert topology.select([3, 2]).gpus == (1, 0)
    switches = {"a": "s1", "b": "s2", "c": "s1"}
    found = units(read_topology([hosts, write_file("x.yaml", "a: s1\nb: s2\nc: s1\n")]))
    assert found == {"host": hosts, "leaf": [switches[host] for host in hosts]}
    both = read_topology([["a", "b", "c", "d"] * 2, "host=2,domain=4"])
    assert both.level("domain").of_rank.tolist() == [0, 0, 1, 1] * 2


# sort() orders ranks by the outermost unit, then by the next ones, then by GPU and rank.
def test_sort_by_unit():
    host, leaf = ["b", "a", "c", "b", "a", "c"], ["s", "t", "s", "s", "t", "s"]
    levels = [Level.of("host", host), Level.of("leaf", leaf)]
    assert Topology(levels).sort(range(6)).tolist() == [0, 3, 2, 5, 1, 4]
    assert Topology(levels).sort([5, 1, 3, 2]).tolist() == [3, 2, 5, 1]
    gpus = (1, 1, 1, 0, 0, 0)
    assert Topology(levels, gpus=gpus).sort(range(6)).tolist() == [3, 0, 5, 2, 4, 1]
    with pytest.raises(LayoutError, match="'gpus': 5"):
        Topology(levels, gpus=gpus[:5])


# {host: switch} can be a mapping or a YAML file.
def test_switches_of_hosts(write_file):
    leaves = {"a": "s1", "b": "s2"}
    wanted = {"host": ["a", "b"], "leaf": ["s1", "s2"]}
    assert units(read_topology(leaves, 2)) == wanted
    assert units(read_topology(write_file("x.yaml", "a: s1\nb: s2\n"), 2)) == wanted


# The first source that names hosts determines their order. If several sources describe the same
# level, the first one counts.
def test_several_sources(write_file):
    hosts = write_file("hosts", "node3 slots=1\nnode0 slots=2\n")
    topology = read_topology([hosts, write_file("topology.conf", RACKS), "domain=3", "domain=1"])
    assert units(topology) == {
        "host": ["node3", "node0", "node0"],
        "domain": ["domain0"] * 3,
        "leaf": ["s1", "s0", "s0"],
        "spine": ["s2"] * 3,
    }


# A world smaller than the machine uses its first GPUs. select() renumbers the selected ranks.
def test_worlds_smaller_than_the_machine():
    topology = read_topology([{"a": "s1", "b": "s2", "c": "s1"}, 2], 6)
    assert read_topology(topology, 3) == topology.select([0, 1, 2])
    last = topology.select([5, 2, 4])
    assert units(last) == {"host": [*"cbc"], "leaf": ["s1", "s2", "s1"]}
    assert last.level("host").of_rank.tolist() == [0, 1, 0]


# A file that cannot be parsed raises LayoutError with the path and the line.
@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("hosts", "a slots=8\nb slots=8x\n", "line 2"),
        ("hosts", "a slots=4\nb slot=4\n", "line 2"),
        ("hosts", "a slots=8\n\na slots=8\n", "line 3"),
        ("t.conf", "SwitchName=a Nodes=x\nSwitchName=b Nodes=x\n", "line 2"),
        ("t.conf", "SwitchName=a Switches=b\n", "line 1"),
        ("t.conf", "SwitchName=a Switches=b\nSwitchName=b Switches=a Nodes=x", "cycle"),
        ("t.yaml", "[" * 2_000, "YAML"),
        ("t.conf", "SwitchName=a Nodes=x\nSwitchName=a Nodes=y\n", "defines switch 'a' again"),
        ("t.yaml", "- {topology: x, tree: {switches: [{switch: a, nodes: [b]}]}}\n", "has no tree"),
    ],
)
def test_files_that_cannot_be_parsed(write_file, name, text, where):
    path = write_file(name, text)
    start = time.process_time()
    with pytest.raises(LayoutError) as caught:
        read_topology(path, 4)
    assert time.process_time() - start < 3
    assert where in str(caught.value)
    assert path in str(caught.value)
    assert len(str(caught.value)) < 1000


# A topology must contain all hosts of the job, and enough GPUs.
def test_machines_that_are_too_small(write_file):
    hosts = write_file("hosts", "node0:4\nother:4\n")
    with pytest.raises(LayoutError, match="has no leaf for 'other'"):
        read_topology([hosts, write_file("topology.conf", RACKS)])
    with pytest.raises(LayoutError, match="9 ranks need more than 8 GPUs"):
        read_topology(hosts, 9)


# If an optional package is missing, the error names the extra to install. Plain lists need no
# package.
def test_missing_packages(write_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.setitem(sys.modules, "hostlist", None)
    for on in (write_file("t.yaml", "a: s"), "n[1-2]"):
        with pytest.raises(MissingPackageError, match=r"pip install 'hypercomm\[place\]'"):
            read_topology(on, 4)
    assert read_topology("n1,n2", 4).level("host").names == ("n1", "n2")
