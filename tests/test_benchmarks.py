"""Test that the benchmarks run, and that their tables, limits and counts are right."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import run_python

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    """Import the benchmarks, which are scripts and not a package."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise store.py sets it
    yield SimpleNamespace(
        **{
            name: importlib.import_module(name)
            for name in ("measure", "nccl", "page", "staleness", "store")
        }
    )
    for name in {path.stem for path in BENCHMARKS.glob("*.py")} & (set(sys.modules) - before):
        del sys.modules[name]


# One command runs all benchmarks, prints one table, writes JSON and draws a chart.
@pytest.mark.clients
def test_all_benchmarks_run(tmp_path):
    done = run_python(BENCHMARKS, "--quick", "--out", tmp_path, seconds=900)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "results.json").read_text())
    rows = report["rows"]
    for row in rows:
        assert row["min"] <= row["median"] <= row["max"]
        assert row["median"] > 0 or row["unit"] == "MB"
        assert row["who"] in done.stdout
    (split,) = [r for r in rows if r["what"].startswith("splits") and r["who"] == "hypercomm"]
    assert split["median"] == 1
    assert split["ratio"] == 1 / 128
    assert split["reached"] is True
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


# benchmarks/README.md has the table of results.json.
def test_page_has_the_results(modules):
    report = json.loads((BENCHMARKS / "results.json").read_text())
    assert modules.page.shown(report) in (BENCHMARKS / "README.md").read_text()


# A ratio counts as worse only if two measurements exceed the ratio on the page by more than their
# noise. Rows of other libraries, and rows that the page does not have, are ignored.
@pytest.mark.parametrize(
    ("first", "second", "verdicts"),
    [
        ([2.0] * 5, None, ["as it was"]),
        ([2.4] * 5, None, ["as it was"]),
        ([1.0] * 5, None, ["better"]),
        ([3.0] * 5, [2.0] * 5, ["worse", "as it was"]),
        ([3.0] * 5, [3.0] * 5, ["worse", "worse"]),
        ([1.0, 1.0, 3.0, 5.0, 5.0], None, ["as it was"]),
    ],
)
def test_ratios_that_became_worse(modules, tmp_path, first, second, verdicts):
    page = tmp_path / "results.json"
    printed = []
    page.write_text(json.dumps({"rows": [{"what": "it", "who": "hypercomm", "ratio": 2.0}]}))
    rounds = iter([first, second])

    def measure():
        samples = {"hypercomm": next(rounds), "peer": [1.0] * 5, "hypercomm, new": [9.0] * 5}
        yield modules.measure.Table("it", "ms", samples, "peer")

    worse = modules.staleness.worse_than(page, measure, printed.append)
    assert [line.rpartition(": ")[2] for line in printed] == verdicts
    assert len(worse) == (verdicts[-1] == "worse")


# A part of benchmarks/nccl.py that fails does not stop the other parts. A part that makes no sense
# on gloo is skipped, and so is a part for which no time is left. The report gives the reason.
def test_parts_of_the_nccl_benchmark(modules, monkeypatch):
    nccl = modules.nccl

    def good(backend, folder, limit_s):
        assert not folder.exists()
        yield {"what": "it", "by": backend, "value": limit_s, "unit": "s"}

    def bad(*_):
        yield {"what": "before", "value": "a fact"}
        raise RuntimeError("a reason")

    needs = next(iter(nccl.NEEDS_CARD))
    assert {*nccl.NEEDS_CARD} < {*nccl.PARTS}
    parts = {"versions": (good, 7), "bad": (bad, 7), needs: (good, 7), "last": (good, 7)}
    monkeypatch.setattr(nccl, "PARTS", parts)
    found = nccl.measure("gloo", [*parts], 60)
    assert [part["outcome"] for part in found] == ["ok", "failed", "skipped", "ok"]
    assert found[1]["why"] == "RuntimeError: a reason"
    assert [part["outcome"] for part in nccl.measure("nccl", [needs], 60)] == ["ok"]
    late = nccl.measure("gloo", ["last"], 5)
    assert late[0]["outcome"] == "skipped"
    assert late[0]["rows"] == []
    assert "left of the time" in late[0]["why"]
    text = nccl.as_text({"parts": [*found, *late], "not on one card": nccl.NOT_ON_ONE_CARD})
    for word in ("a fact", "a reason", nccl.NEEDS_CARD[needs], "7 s", *nccl.NOT_ON_ONE_CARD):
        assert word in text


# docs/explanation/nccl.md names each part.
def test_nccl_page_names_each_part(modules):
    page = (BENCHMARKS.parent / "docs" / "explanation" / "nccl.md").read_text()
    assert [name for name in modules.nccl.PARTS if f"`{name}`" not in page] == []


# The requests and bytes of one rank for a creation do not depend on the number of ranks.
def test_cost_of_a_creation_is_constant_per_rank(modules):
    costs = []
    for size in (64, 1024):
        store = modules.store.met(size, 0.0)
        requests, sent = store.requests.total() / size, store.sent.total() / size
        assert len(store.requests) == size
        assert requests <= 3.1
        assert sent <= 200
        costs.append((requests, sent))
    (few, few_sent), (many, many_sent) = costs
    assert many == pytest.approx(few, rel=0.05)
    assert many_sent == pytest.approx(few_sent, rel=0.1)
