"""Sources that contradict each other, sizes that no machine has, and what clusters really write."""

import json

import pytest
from unit_names import units

from hypercomm.errors import TopologyError
from hypercomm.layout.placing import place
from hypercomm.topology import read_topology
from hypercomm.topology.reading import place_of

pytestmark = pytest.mark.torch_free


EIGHTS, FOURS = "a slots=8\nb slots=8\n", "a slots=4\nb slots=4\n"


# Ranks 8..11 of a host of 4 would be in domains 0 and 1 of 10; domains of 12 cut the second host
# of 8. A host has one number of GPUs, a switch one above it, whichever files say so.
@pytest.mark.parametrize(
    ("sources", "arguments", "says"),
    [
        (["domain=10"], {"world_size": 20, "gpus_per_host": 4}, "host=4 and domain=10 contradict"),
        ([EIGHTS, "domain=12"], {}, "domain=12 cuts host 'b', whose 8 GPUs are ranks 8..15"),
        ([EIGHTS, "domain=3"], {}, "domain=3 cuts host 'a', whose 8 GPUs are ranks 0..7"),
        ([EIGHTS, "host=4"], {}, "gives 'a' 8 GPUs, on='host=4' 4; correct one of them"),
        ([FOURS, "8,16"], {}, "gives 'a' 4 GPUs, on='8,16' 8; correct one of them"),
        ([EIGHTS, FOURS], {}, "gives 'a' 8 GPUs, "),
        (
            [{"a": ["l", "s1"], "b": ["l", "s2"]}],
            {"world_size": 2},
            "leaf 'l' below spine 's1' (host 'a') and 's2' (host 'b')",
        ),
    ],
)
def test_contradictions(file, sources, arguments, says):
    for number, source in enumerate(sources):
        if isinstance(source, str) and "slots" in source:
            sources = [*sources[:number], file(f"hosts{number}", source), *sources[number + 1 :]]
    with pytest.raises(TopologyError) as caught:
        read_topology(sources, **arguments)
    assert says in str(caught.value)


# Sources that agree are read, whatever their order: the inner level comes first.
def test_what_agrees(file):
    topology = read_topology("domain=8", 16, gpus_per_host=4)
    assert topology.names == ("host", "domain")
    assert topology.level("host").of_rank.tolist() == [rank // 4 for rank in range(16)]
    eights = file("hosts", EIGHTS)
    assert units(read_topology([eights, "8,16"]))["domain"] == ["domain0"] * 16
    assert read_topology([eights, "domain=4"]).level("domain").units == 16 // 4
    assert read_topology([eights, "domain=16"], gpus_per_host=3).level("domain").units == 1
    assert read_topology([eights, eights], gpus_per_host=2).level("host").sizes.tolist() == [8, 8]


# More GPUs than the largest world has, 2**24, are refused before anything is made of them.
@pytest.mark.parametrize(
    ("read", "arguments"),
    [
        (read_topology, {"on": 10**9, "world_size": 8}),
        (read_topology, {"on": "8,800000000", "world_size": 8}),
        (read_topology, {"on": "domain=8", "world_size": 8, "gpus_per_host": 2**24 + 8}),
        (read_topology, {"on": "n[1-17]", "gpus_per_host": 999_999}),
        (place, {"sizes": "tp=2", "on": "8,800000000"}),
    ],
)
def test_too_many_gpus(read, arguments):
    with pytest.raises(TopologyError, match="GPUs are more than 16,777,216, the most read"):
        read(**arguments)


def test_too_many_gpus_of_hosts(file):
    hosts = file("hosts", "".join(f"n{number} slots=999999\n" for number in range(17)))
    with pytest.raises(TopologyError, match="16,999,983 GPUs are more than 16,777,216"):
        read_topology(hosts)


# Numbers of any length, and names that look like ours, end in no other error than our own.
def test_odd_numbers_and_names(file):
    with pytest.raises(TopologyError, match="is no JSON: "):
        read_topology(file("t.json", f'{{"a": {"9" * 5000}}}'), 4)
    for text in ("9" * 5000, f"host={'9' * 5000}"):
        with pytest.raises(TopologyError, match="has no number of GPUs") as caught:
            read_topology(text, 4)
        assert len(str(caught.value)) < 1000
    assert read_topology(["node[1-4]", "host=8,tier-a=16"]).names == ("host", "tier-a")
    assert place_of("tier-3") > place_of("spine") > place_of("tier-") == place_of("rack")


# A key that comes twice in YAML is refused with its line, as it is in JSON; merges are no keys.
def test_twice_in_yaml(file):
    with pytest.raises(TopologyError, match=r"t.yaml, line 3 names 'a' twice"):
        read_topology(file("t.yaml", "a: s1\nb: s1\na: s2\n"), 4)
    tree = "- topology: x\n  tree:\n    switches:\n    - {switch: a, nodes: n1, nodes: n2}\n"
    with pytest.raises(TopologyError, match=r"line 4 names 'nodes' twice"):
        read_topology(file("t.yaml", tree), 4)
    merged = "a: &a {network.topology.nvidia.com/leaf: l}\nb: {<<: *a, nvidia.com/gpu.count: 2}\n"
    assert units(read_topology(file("t.yaml", merged), 4))["leaf"] == ["l"] * 4


# Behind a host stands what Open MPI and Hydra write; a slip of the pen is refused with its line.
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a slots=4\nb slot=4\n", "line 2 has 'slot=4' behind the host"),
        ("rank 0=a slot=0\n", "line 1 has '0=a' behind the host"),
        ("a count=4\n", "line 1 has 'count=4' behind the host"),
    ],
)
def test_words_behind_a_host(file, text, says):
    with pytest.raises(TopologyError) as caught:
        read_topology(file("hosts", text), 4)
    assert says in str(caught.value)
    known = "a slots=1 max-slots=2\nb:1 user=me binding=rr\n"
    assert units(read_topology(file("hosts", known))) == {"host": ["a", "b"]}


BLOCK = "BlockName=b1 Nodes=n[1-2]\n"
TREE = "SwitchName=s1 Nodes=n[1-4]\n"


# A cluster of NVL72 and ordinary nodes: a host in no block is a domain by itself.
def test_hosts_in_no_block(file):
    wanted = {"host": ["n1", "n2", "n3", "n4"], "domain": ["b1", "b1", "n3", "n4"]}
    wanted["leaf"] = ["s1"] * 4
    assert units(read_topology(file("topology.conf", BLOCK + TREE), 4)) == wanted
    yaml = """
- topology: tree
  cluster_default: true
  tree: {switches: [{switch: s1, nodes: "n[1-4]", children:}]}
- topology: nvl
  block: {block_sizes: [2], blocks: [{block: b1, nodes: "n[1-2]"}]}
- topology: elsewhere
  block: {block_sizes: [2], blocks: [{block: b9, nodes: "m[1-2]"}]}
"""
    assert units(read_topology(file("topology.yaml", yaml), 4)) == wanted
    with pytest.raises(TopologyError, match="has no leaf for host 'n9', which it names"):
        read_topology(file("topology.conf", "BlockName=b1 Nodes=n9\n" + TREE), 4)


# Spaces, quotes, and what `scontrol show topology` prints, which repeats the hosts of switches
# below.
@pytest.mark.parametrize(
    "text",
    [
        'SwitchName=s0 Nodes="n[1-2]"\nSwitchName=top Switches="s0"\n',
        "SwitchName = s0 Nodes = n[1-2]\nSwitchName = top Switches = s0\n",
        "SwitchName=s0 Level=0 Nodes=n[1-2]\nSwitchName=top Level=1 Nodes=n[1-2] Switches=s0\n",
    ],
)
def test_ways_to_write_switches(file, text):
    wanted = {"host": ["n1", "n2"], "leaf": ["s0"] * 2, "spine": ["top"] * 2}
    assert units(read_topology(file("topology.conf", text), 2)) == wanted


def test_blocks_of_scontrol(file):
    text = "BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\n"
    assert units(read_topology(file("topology.conf", text), 2))["domain"] == ["b1"] * 2
    more = "BlockName=b2 Nodes=n[3-4] BlockSize=2\nBlockName=b3 Nodes=n[5-6] BlockSize=2\n"
    more += "AggregatedBlock=b[1-2] BlockIndex=3 Nodes=n[1-4] BlockSize=4\n"
    found = read_topology(file("topology.conf", text + more), 6)
    assert found.level("block-4").of_rank.tolist() == [0, 0, 0, 0, 1, 1]
    with pytest.raises(TopologyError, match="has 'Nodes=Switches=b'; write it like"):
        read_topology(file("topology.conf", "SwitchName=a Nodes= Switches=b\n"), 2)


# A node of Kubernetes with GPUs and no place is one by itself; a control plane is left out.
def test_nodes_without_labels(file):
    count = {"nvidia.com/gpu.count": "2"}
    labels = {"a": {"accelerator.topograph.run/domain": "d"} | count, "b": count, "control": {}}
    items = [{"metadata": {"name": name, "labels": said}} for name, said in labels.items()]
    found = read_topology(file("nodes.json", json.dumps({"items": items})))
    assert units(found) == {"host": [*"aabb"], "domain": ["d", "d", "b", "b"]}
    items[1] |= {"metadata": {"name": "b"}, "status": {"capacity": {"nvidia.com/gpu": "2"}}}
    assert read_topology(file("nodes.json", json.dumps({"items": items}))) == found
    items[1]["metadata"]["labels"] = {"nvidia.com/gpu.count": "0"}
    assert read_topology(file("nodes.json", json.dumps({"items": items}))).world_size == 2


# Sentences say what there is, and name a file that is missing as one.
def test_sentences(file, monkeypatch):
    with pytest.raises(TopologyError) as caught:
        read_topology(file("t.yaml", "- topology: x\n"), 4)
    assert "[]" not in str(caught.value)
    with pytest.raises(TopologyError, match=r"'my,hosts.json' is no file"):
        read_topology("my,hosts.json", 4)
    with pytest.raises(TopologyError, match=r"has 1 GPU, but the world has 2 ranks; .* 1 rank$"):
        read_topology(file("h", "a:1\n"), 2)
    tree = "- topology: x\n  tree:\n    switches:\n    - {switch: s1, nodes:}\n"
    with pytest.raises(TopologyError, match="holds no host"):
        read_topology(file("t.yaml", tree), 4)
    monkeypatch.setattr("hypercomm.topology.found._LARGEST_FILE", 4)
    large = file("hosts", "a slots=2\n")
    with pytest.raises(TopologyError) as caught:
        read_topology(large)
    assert str(caught.value) == f"{large} has more than 4 bytes: it is no topology"
