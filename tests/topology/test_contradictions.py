"""Sources that contradict each other, sizes that no machine has, and what clusters really write."""

import pytest

from hypercomm.errors import TopologyError
from hypercomm.layout import place
from hypercomm.topology import read_topology
from hypercomm.topology.reading import place_of

pytestmark = pytest.mark.torch_free


@pytest.fixture
def file(tmp_path):
    """Write a file, and say where it is."""

    def write(name, text):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def units(topology):
    """The names of the units of each rank, by level."""
    return {level.name: [level.names[unit] for unit in level.of_rank] for level in topology.levels}


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
