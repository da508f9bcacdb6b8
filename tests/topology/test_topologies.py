"""Where ranks are, as each kind of file says it: read as its manual describes it, or refused."""

import json
import sys

import numpy as np
import pytest
from unit_names import units

from hypercomm.errors import LayoutError, MissingPackageError, TopologyError
from hypercomm.topology import Level, Topology, read_topology
from hypercomm.topology.node_lists import expand_hosts
from hypercomm.topology.reading import read_machine

pytestmark = pytest.mark.torch_free

RACKS = """
# the example of topology.conf(5), with nodes of our own
SwitchName=s0 Nodes=node[0-1] LinkSpeed=900
switchname=s1 nodes=node[2-3]
SwitchName=s2 \\
    Switches=s[0-1]
"""
NVL72 = "BlockName=b1 Nodes=n[01-18]\nBlockName=b2 Nodes=n[19-36]\nBlockSizes=18,36\n"
SLURM_YAML = """
- topology: flat
  flat: true
- topology: racks
  cluster_default: true
  tree:
    switches:
      - {switch: top, children: "s[1-2]"}
      - {switch: s1, nodes: "node[01-02]"}
      - {switch: s2, nodes: "node[03-04]"}
"""


# Blocks: rank r is on host r // 4, in domain r // 8.
@pytest.mark.parametrize("on", ["4,8", "host=4,domain=8", " host=4 , domain=8 "])
def test_blocks(on):
    topology = read_topology(on, 12)
    assert topology.names == ("host", "domain")
    for level, size in zip(topology.levels, (4, 8), strict=True):
        assert level.of_rank.tolist() == [rank // size for rank in range(12)]
    assert read_topology(4, 12) == read_topology("4", 12) == Topology(topology.levels[:1])


# Hostfiles of Open MPI, DeepSpeed and MPICH, with comments; ranks fill hosts in the file's order.
@pytest.mark.parametrize(
    "text",
    [
        "b slots=2\na slots=1\n",
        "# ours\n\nb   slots=2 max_slots=4\na slots=1 # last",
        "b:2\na:1\n",
        "\ufeffb:2\r\na:1\r\n",
    ],
)
def test_hostfiles(file, text):
    assert units(read_topology(file("hosts", text))) == {"host": ["b", "b", "a"]}


# Node lists as slurm.conf(5) describes them: ranges keep their zeros, brackets are multiplied.
@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1,n2", ["n1", "n2"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[7,9-10]-ib, m1", ["n7-ib", "n9-ib", "n10-ib", "m1"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
    ],
)
def test_node_lists(text, hosts):
    assert expand_hosts(text) == hosts
    assert units(read_topology(text, 2 * len(hosts)))["host"] == list(np.repeat(hosts, 2))


# SLURM's trees: the leaf is the switch of a node, the spine the one above.
def test_topology_conf(file):
    topology = read_topology(file("topology.conf", RACKS), 8)
    assert units(topology) == {
        "host": list(np.repeat([f"node{number}" for number in range(4)], 2)),
        "leaf": ["s0"] * 4 + ["s1"] * 4,
        "spine": ["s2"] * 8,
    }


# SLURM's blocks are NVLink domains, and several of them a larger block.
def test_blocks_of_slurm(file):
    topology = read_topology(file("topology.conf", NVL72), gpus_per_host=4)
    assert topology.names == ("host", "domain", "block-36")
    assert topology.level("domain").of_rank.tolist() == [rank // 72 for rank in range(144)]
    assert topology.level("block-36").units == 1


# Of several topologies of a topology.yaml the default one counts.
def test_topology_yaml(file):
    topology = read_topology(file("topology.yaml", SLURM_YAML), 4)
    assert units(topology)["leaf"] == ["s1", "s1", "s2", "s2"]
    assert units(topology)["spine"] == ["top"] * 4


# Other topologies of the file say more of the same hosts; "#name" takes another than the default.
def test_several_in_topology_yaml(file):
    blocks = """
- topology: nvl
  block:
    block_sizes: [1, 2]
    blocks:
      - {block: b1, nodes: "node[01-03]"}
      - {block: b2, nodes: "node04,node05"}
"""
    path = file("topology.yaml", SLURM_YAML + blocks)
    topology = read_topology(path, 4)
    assert topology.names == ("host", "domain", "block-2", "leaf", "spine")
    assert units(topology)["domain"] == ["b1", "b1", "b1", "b2"]
    other = read_topology(f"{path}#nvl", 5)
    assert other.names == ("host", "domain", "block-2")
    assert other.level("block-2").units == 1
    with pytest.raises(TopologyError, match=r"has no topology 'x'; there are \['flat', 'racks'"):
        read_topology(f"{path}#x", 4)
    with pytest.raises(TopologyError, match="'flat' is neither a tree nor of blocks"):
        read_topology(f"{path}#flat", 4)


# Topograph's labels of both releases, and what kubectl prints; nodes without labels are no GPUs'.
def test_labels(file):
    new = {"fabric.topograph.run/tier-0": "l1", "fabric.topograph.run/tier-1": "s1"}
    old = {"network.topology.nvidia.com/leaf": "l1", "network.topology.nvidia.com/spine": "s1"}
    for labels, domain in [
        (new, "accelerator.topograph.run/domain"),
        (old, "network.topology.nvidia.com/accelerator"),
    ]:
        nodes = {host: labels | {domain: "d", "nvidia.com/gpu.count": 2} for host in "ab"}
        topology = read_topology(nodes)
        wanted = {"host": [*"aabb"], "domain": ["d"] * 4, "leaf": ["l1"] * 4, "spine": ["s1"] * 4}
        assert units(topology) == wanted
        items = [{"metadata": {"name": host, "labels": nodes[host]}} for host in nodes]
        items.append({"metadata": {"name": "control", "labels": {"kubernetes.io/os": "linux"}}})
        assert read_topology(file("nodes.json", json.dumps({"items": items}))) == topology


# {host: switch} and {host: switches}, as JSON or as a mapping; a mapping needs no file.
def test_switches_of_hosts(file):
    leaves = {"a": "s1", "b": "s2"}
    assert read_topology(file("x.json", json.dumps(leaves)), 2) == read_topology(leaves, 2)
    found = units(read_topology({"a": ["s1", "t", "u", "v"], "b": ["s2", "t", "u", "v"]}, 2))
    assert [*found] == ["host", "leaf", "spine", "core", "tier-3"]


# The hostfile says the order of hosts, the others what is around them.
def test_several(file):
    hosts = file("hosts", "node3 slots=1\nnode0 slots=2\n")
    topology = read_topology([hosts, file("topology.conf", RACKS), "domain=1"])
    assert units(topology) == {
        "host": ["node3", "node0", "node0"],
        "domain": ["domain0", "domain1", "domain2"],
        "leaf": ["s1", "s0", "s0"],
        "spine": ["s2"] * 3,
    }


# A world smaller than the machine has its first GPUs; selected ranks are numbered anew.
def test_fewer_ranks():
    topology = read_topology({"a": "s1", "b": "s2", "c": "s1"}, 6, gpus_per_host=2)
    assert read_topology(topology, 3) == topology.select([0, 1, 2])
    last = topology.select([5, 2, 4])
    assert units(last) == {"host": [*"cbc"], "leaf": ["s1", "s2", "s1"]}
    assert last.level("host").of_rank.tolist() == [0, 1, 0]


# A machine of blocks has as many whole ones as are needed, any other as many as it has.
def test_machines():
    machine = read_machine("4,72")
    assert [machine(ranks).world_size for ranks in (1, 72, 73)] == [72, 72, 144]
    assert read_machine({"a": "s"}, 4)(100).world_size == 4


# Topologies are values, and so are levels.
def test_values():
    one, other = read_topology("2,4", 8), read_topology("2,4", 8)
    assert one == other
    assert hash(one) == hash(other)
    assert one != read_topology("2,8", 8)
    assert one.levels[0] != "host"
    assert Topology(Level(**level) for level in one.to_dict()["levels"]) == one
    with pytest.raises(ValueError, match="read-only"):
        one.levels[0].of_rank[0] = 1


# What cannot be read is refused, with the file and the line.
@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("hosts", "a slots=8\nb slots=8x\n", "line 2 gives 'b' '8x' GPUs, which is no number of 1"),
        ("hosts", "a slots=0\n", "line 1 gives 'a' '0' GPUs"),
        ("hosts", "a:-3\n", "line 1 gives 'a' '-3' GPUs"),
        ("hosts", "a 8\n", "line 1 has '8' behind the host; write a host like 'node01 slots=8'"),
        (
            "hosts",
            "a slots=8\n\na slots=8\n",
            "line 3 names 'a', as line 1 did; name each host once",
        ),
        ("hosts", "# nothing\n", "names no host"),
        (
            "t.conf",
            "SwitchName=a Nodes=x\nSwitchName=b Nodes=x\n",
            "line 2 puts host 'x' into switch",
        ),
        ("t.conf", "SwitchName=a Nodes=x\nSwitchName=a Nodes=y\n", "line 2 names switch 'a', as"),
        (
            "t.conf",
            "SwitchName=a Switches=b\n",
            "line 1 has 'b' below 'a', which no line describes",
        ),
        ("t.conf", "SwitchName=a Nodes=x[1-\n", "line 1: 'x[1-' is no node list"),
        ("t.conf", "SwitchName=a Knots=x\n", "line 1 has 'Knots=x'; write it like"),
        ("t.conf", "SwitchName=a Switches=b\nSwitchName=b Switches=a Nodes=x", "in a circle"),
        (
            "t.conf",
            "SwitchName=a Switches=b\n" * 2 + "SwitchName=b Nodes=x",
            "names switch 'a', as",
        ),
        (
            "t.conf",
            "BlockName=b Nodes=x\nBlockSizes=many\n",
            "line 2 has 'many', which is no number",
        ),
        ("t.conf", "BlockName=b\n", "holds no host"),
        ("t.json", '{"a": "s", "a": "t"}', "names 'a' twice"),
        ("t.json", '{"a": ', "is no JSON: Expecting value"),
        ("t.json", '{"a": {"x": 1}}', "has no label of 'a' that is known, but ['x']"),
        ("t.json", '{"a": 3}', "says 3 of 'a'; give its switch"),
        ("t.json", '{"a": ["s", "t"], "b": "s"}', "says no spine of b, but of a; add it"),
        ("t.json", "[]", "it must map hosts to switches or labels"),
        ("t.yaml", "- topology: x\n", "is neither a tree nor of blocks"),
        ("t.yaml", "- topology: x\n  tree: {}\n", "needs a list of switches, got None"),
        ("t.yaml", "a: [", "is no YAML"),
    ],
)
def test_bad_files(file, name, text, says):
    path = file(name, text)
    with pytest.raises(TopologyError) as caught:
        read_topology(path, 4)
    assert says in str(caught.value)
    assert path in str(caught.value)


# So are bad arguments; each sentence says what would do.
@pytest.mark.parametrize(
    ("on", "world_size", "says"),
    [
        ("nope.txt", 4, "'nope.txt' is no file; on must be GPUs for each host (8, '8,72'"),
        (
            "8,36",
            72,
            "a domain of 36 GPUs does not hold several whole hosts of 8; 32 or 40 would do",
        ),
        ("8,8", 8, "16 would do"),
        ("host=8,host=16", 8, "'host=16' in 'host=8,host=16' has no name of its own"),
        ("a=b", 8, "'a=b' in 'a=b' has no number of GPUs"),
        (8, None, "on=8 says how large units are, but not how many: give world_size"),
        ("n[1-3],n2", 6, "names 'n2' twice; name each host once"),
        ("n[1-2]", 3, "does not say how many GPUs n1, n2 have; 3 ranks do not spread evenly"),
        ("n[1-99999999]", 4, "names more than 1048576 hosts"),
        ("n[2-1]", 4, "'2-1' in 'n[2-1]' is no range of hosts"),
        ({"a": "s"}, None, "on does not say how many GPUs a have; give gpus_per_host"),
        ({}, 4, "on holds no host"),
        ([], 4, "on is empty; give GPUs"),
        (" ", 4, "on is empty; give GPUs"),
        (1.5, 4, "got 1.5"),
        (True, 4, "got True"),
        ("live", 4, "in a job give hypercomm.live_topology()"),
        ([{"a": "s"}, {"a": "t"}], 4, "says the leaf of hosts, as another did; give one of them"),
        (["4,8", "host=2"], 4, "host=4 and host=2 of on='host=2' contradict"),
    ],
)
def test_bad_arguments(on, world_size, says):
    with pytest.raises(TopologyError) as caught:
        read_topology(on, world_size)
    assert says in str(caught.value)


# A topology must hold all hosts, and enough of them.
def test_too_small(file):
    hosts = file("hosts", "node0:4\nother:4\n")
    with pytest.raises(TopologyError, match=r"says no leaf of other; add them, or leave"):
        read_topology([hosts, file("topology.conf", RACKS)])
    with pytest.raises(TopologyError, match="has 8 GPUs, but the world has 9 ranks; add hosts"):
        read_topology(hosts, 9)
    with pytest.raises(LayoutError, match="gpus_per_host must be at least 1, got 0"):
        read_topology(8, 8, gpus_per_host=0)


# Levels that are put together by hand are checked, too.
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Level("host", [1, 0], "ab"), r"must be numbered 0, 1, ... by their first rank"),
        (lambda: Level("host", [0, 1], "a"), "has 2 units and 1 names"),
        (lambda: Level("host", [[0]], "a"), "of_rank must hold an int for each rank"),
        (lambda: Level("host", "ab", "a"), "of_rank must hold an int for each rank"),
        (lambda: Topology([]), "needs one Level at least"),
        (lambda: Topology([Level.of("a", "xy"), Level.of("a", "xy")]), "have one name"),
        (lambda: Topology([Level.of("a", "xy"), Level.of("b", "x")]), "different numbers of ranks"),
        (lambda: read_topology(2, 4).level("hots"), "unknown level 'hots'.* did you mean 'host'"),
    ],
)
def test_bad_levels(make, says):
    with pytest.raises(TopologyError, match=says):
        make()


# Without pyyaml a file of YAML is refused, with what to install.
def test_without_yaml(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'hypercomm\[topology\]'"):
        read_topology(file("t.yaml", "a: s"), 4)
