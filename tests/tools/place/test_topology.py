"""Test descriptions of machines from each kind of source."""

import sys
import time
from pathlib import Path

import pytest

from hypercomm import read_topology
from hypercomm.errors import LayoutError, MissingPackageError
from hypercomm.tools.place import Level, Topology

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.torch_free

TABLE = tomllib.loads(Path(__file__).with_name("machines.toml").read_text(encoding="utf-8"))


def units(topology):
    """Map each level to the names of the units of all ranks."""
    return {level.name: [level.names[unit] for unit in level.of_rank] for level in topology.levels}


# Each rank is in the units that the table has, or the error has the phrases of the table.
@pytest.mark.parametrize("row", TABLE["machine"], ids=lambda row: str(row["on"]))
def test_machines(row, tmp_path):
    files = row.get("files", {})
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode())
    on = [str(tmp_path / one) if str(one) in files else one for one in row["on"]]
    if "error" in row:
        with pytest.raises(LayoutError) as caught:
            read_topology(on, row.get("ranks", 4))
        assert [part for part in row["error"] if part not in str(caught.value)] == []
        return
    topology = read_topology(on, row.get("ranks"))
    assert units(topology) == row["units"]
    assert topology.names == tuple(row["units"])
    assert topology.gpus is None


# With sizes, rank r is on host r // 4 and in domain r // 8.
@pytest.mark.parametrize("on", ["4,8", "host=4,domain=8", " host=4 , domain=8 ", "domain=8,host=4"])
def test_sizes(on):
    topology = read_topology(on, 12)
    assert topology.names == ("host", "domain")
    for level, size in zip(topology.levels, (4, 8), strict=True):
        assert level.of_rank.tolist() == [rank // size for rank in range(12)]
    assert read_topology(4, 12) == read_topology("4", 12) == Topology(topology.levels[:1])


# A list has the host and the GPU of each rank, or a mapping the switch of each host.
def test_sources_that_are_no_text():
    topology = read_topology([("b", 1), ("a", 0), ("b", 0), ("a", 1)])
    assert units(topology)["host"] == ["b", "a", "b", "a"]
    assert topology.gpus == (1, 0, 0, 1)
    assert topology.select([3, 2]).gpus == (1, 0)
    wanted = {"host": ["a", "b"], "leaf": ["s1", "s2"]}
    assert units(read_topology({"a": "s1", "b": "s2"}, 2)) == wanted
    assert read_topology(("a", "b", "a")) == read_topology(["a", "b", "a"])


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


# A world smaller than the machine uses its first GPUs. select() renumbers the selected ranks.
def test_worlds_smaller_than_the_machine():
    topology = read_topology([{"a": "s1", "b": "s2", "c": "s1"}, 2], 6)
    assert read_topology(topology, 3) == topology.select([0, 1, 2])
    last = topology.select([5, 2, 4])
    assert units(last) == {"host": [*"cbc"], "leaf": ["s1", "s2", "s1"]}
    assert last.level("host").of_rank.tolist() == [0, 1, 0]


def test_deeply_nested_file_is_read_fast(tmp_path):
    (tmp_path / "t.yaml").write_text("[" * 1_000)
    start = time.process_time()
    with pytest.raises(LayoutError, match="is not valid YAML"):
        read_topology(tmp_path / "t.yaml", 4)
    assert time.process_time() - start < 3


# If an optional package is missing, the error names the extra to install. Plain lists need no
# package.
def test_missing_packages(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.setitem(sys.modules, "hostlist", None)
    (tmp_path / "t.yaml").write_text("a: s")
    for on in (tmp_path / "t.yaml", "n[1-2]"):
        with pytest.raises(MissingPackageError, match=r"pip install 'hypercomm\[place\]'"):
            read_topology(on, 4)
    assert read_topology("n1,n2", 4).level("host").names == ("n1", "n2")
