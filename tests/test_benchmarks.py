"""The benchmarks run, and their tables, goals and counts are right."""

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
    """Imports the benchmarks, which are scripts and no package."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # store.py sets it, unless it is set
    yield SimpleNamespace(
        **{
            name: importlib.import_module(name)
            for name in ("measure", "nccl", "page", "staleness", "store")
        }
    )
    for name in {path.stem for path in BENCHMARKS.glob("*.py")} & (set(sys.modules) - before):
        del sys.modules[name]


# One command runs everything, prints one table, writes JSON and draws a chart.
@pytest.mark.clients
def test_everything_runs(tmp_path):
    done = run_python(BENCHMARKS, "--quick", "--out", tmp_path, seconds=900)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "results.json").read_text())
    rows = report["rows"]
    for row in rows:
        assert row["min"] <= row["median"] <= row["max"]
        assert row["median"] > 0 or row["unit"] == "MB"
        assert row["who"] in done.stdout
    (split,) = [r for r in rows if r["what"].startswith("splits") and r["who"] == "hypercomm"]
    assert (split["median"], split["ratio"], split["reached"]) == (1, 1 / 128, True)
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


# The page has the table of results.json.
def test_the_page(modules):
    report = json.loads((BENCHMARKS / "results.json").read_text())
    assert modules.page.shown(report) in (BENCHMARKS / "README.md").read_text()


# A ratio is worse than on the page only if two measurements agree, by more than the noise of their
# rounds. Rows of other libraries, and rows that the page does not have, are left out.
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
def test_what_became_worse(modules, tmp_path, first, second, verdicts):
    page, said = tmp_path / "results.json", []
    page.write_text(json.dumps({"rows": [{"what": "it", "who": "hypercomm", "ratio": 2.0}]}))
    rounds = iter([first, second])

    def measure():
        samples = {"hypercomm": next(rounds), "peer": [1.0] * 5, "hypercomm, new": [9.0] * 5}
        yield modules.measure.Table("it", "ms", samples, "peer")

    worse = modules.staleness.worse_than(page, measure, said.append)
    assert [line.rpartition(": ")[2] for line in said] == verdicts
    assert len(worse) == (verdicts[-1] == "worse")


# A part that fails does not end the others; one without a meaning on gloo, or without time, is
# skipped with the reason.
def test_parts_of_nccl(modules, monkeypatch):
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
    assert (late[0]["outcome"], late[0]["rows"]) == ("skipped", [])
    assert "left of the time" in late[0]["why"]
    text = nccl.as_text({"parts": [*found, *late], "not on one card": nccl.NOT_ON_ONE_CARD})
    for word in ("a fact", "a reason", nccl.NEEDS_CARD[needs], "7 s", *nccl.NOT_ON_ONE_CARD):
        assert word in text


# Without torch that sees a card, the other parts are left out.
def test_no_card(modules, monkeypatch):
    def none(*_):
        yield {"what": "card", "value": "none"}
        raise RuntimeError("torch sees no card")

    monkeypatch.setitem(modules.nccl.PARTS, "versions", (none, 7))
    found = modules.nccl.measure("nccl", ["versions", "check", "abort"], 60)
    assert [part["outcome"] for part in found] == ["failed"]


# The page names each part.
def test_page_of_nccl(modules):
    page = (BENCHMARKS.parent / "docs" / "explanation" / "nccl.md").read_text()
    assert [name for name in modules.nccl.PARTS if f"`{name}`" not in page] == []


# A rank sends a constant number of messages and bytes for a creation, whatever the number of ranks.
def test_a_creation_costs_a_rank_the_same_in_any_job(modules):
    costs = []
    for size in (64, 1024):
        job = modules.store.Job(size)
        job.call(0.0)
        assert len(job.ended) == size
        requests, sent = job.store.requests / size, job.store.sent / size
        assert (job.busiest.total(), job.bytes.total()) == (job.store.requests, job.store.sent)
        assert requests <= 4.2
        assert sent <= 1000
        costs.append((requests, sent))
    (few, few_sent), (many, many_sent) = costs
    assert many == pytest.approx(few, rel=0.05)
    assert many_sent == pytest.approx(few_sent, rel=0.05)
