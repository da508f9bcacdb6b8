"""`hypercomm draw` as a user meets it."""

import subprocess
import sys
import time
import xml.etree.ElementTree as ET

import pytest

from hypercomm import RankLayout, RankMapping
from hypercomm.layout.difference import difference

pytestmark = pytest.mark.torch_free


# Without a file it is shown, as wide as the terminal is; a pipe has no colours.
def test_terminal(in_process, monkeypatch):
    done = in_process("draw", "tp=2,dp=4")
    assert (done.returncode, done.stderr) == (0, "")
    text = RankLayout.parse("tp=2,dp=4").draw(on="8").text(width=120, color=False)
    assert done.stdout.splitlines() == text.splitlines()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = in_process("draw", "tp=4,dp=4,pp=2").stdout
    assert "\x1b[" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    plain = in_process("draw", "tp=4,dp=4,pp=2").stdout
    assert "48;5" not in plain
    assert all(len(line) <= 40 for line in plain.splitlines() if "\x1b" not in line)


# With a file it is written: a layout, a change, a mapping.
@pytest.mark.parametrize(
    ("arguments", "drawing"),
    [
        (["tp=2,dp=4", "--on", "4"], RankLayout.parse("tp=2,dp=4").draw(on="4")),
        (
            ["tp=2,dp=4", "--on", "none", "--dims", "dp"],
            RankLayout.parse("tp=2,dp=4").draw(dims="dp"),
        ),
        (
            ["tp=2,dp=4", "--groups", "tp,tp+dp"],
            RankLayout.parse("tp=2,dp=4").draw(on="8", groups=["tp", "tp+dp"]),
        ),
        (
            ["tp=2,dp=-1", "tp=4,dp=4"],
            difference(RankLayout.parse("tp=2,dp=8"), RankLayout.parse("tp=4,dp=4")).draw(on="8"),
        ),
        (
            ["tp=2,dp=4", "--to", "tp=4,dp=2", "--shape", "8,16", "--itemsize", "2"],
            RankMapping("tp=2,dp=4", "tp=4,dp=2").draw([8, 16], 2, on="8"),
        ),
        (
            ["tp=2,dp=2", "--to", "tp=2,dp=4", "--to-offset", "4"],
            RankMapping("tp=2,dp=2", RankLayout([2, 4], ["tp", "dp"], 4)).draw(on="8"),
        ),
    ],
)
def test_files(in_process, tmp_path, arguments, drawing):
    file = tmp_path / "picture.svg"
    done = in_process("draw", *arguments, "-o", str(file))
    assert (done.returncode, done.stdout) == (0, "")
    assert file.read_text(encoding="utf-8") == drawing.svg()
    assert done.stderr == f"{file}: {file.stat().st_size:,} bytes\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["tp=2,dp=4", "-o", "grid.pdf"],
            "ends in no kind of picture that can be written: use .svg",
        ),
        (
            ["tp=2,dp=4", "-o", "there.svg"],
            "there.svg exists, and is kept; force=True (--force)",
        ),
        (["tp=2,dp=4", "--dims", "pp"], "unknown dim 'pp'; the dims are ('tp', 'dp')"),
        (["tp=2,dp=4", "--groups", "tp,tp"], "groups 'tp' come twice in 'tp,tp'"),
        (["tp=2,dp=0"], "the size in 'dp=0' must be a positive integer"),
        (["tp=2,dp=-1"], "the size of dim 'dp' is open; give it, or --world-size"),
        (["tp=2,dp=4", "--on", "0"], "must be from 1 to"),
        (
            ["tp=2,dp=4", "tp=4,dp=2", "--to", "dp=8"],
            "a second layout draws a change, --to a mapping",
        ),
        (["tp=2", "--dims", "tp", "--groups", "tp"], "--groups in several; give one"),
        (["tp=2", "--to", "tp=2", "--dims", "tp"], "a mapping has no groups; leave --dims out"),
        (["tp=2", "tp=2", "--groups", "tp"], "a change is drawn for --dims; leave --groups out"),
        (["tp=2", "--shape", "8"], "--shape is about a mapping, which needs --to"),
        (["tp=2", "--itemsize", "4"], "--itemsize is about a mapping, which needs --to"),
        (["tp=2", "tp=2", "--to-offset", "4"], "--to-offset is about a mapping, which needs --to"),
        (["tp=2", "--to", "tp=2", "--to-offset", "-1"], "--to-offset must be non-negative, got -1"),
        (["tp=2", "--to", "dp=2", "--shape", "8,x"], "--shape '8,x' must be lengths"),
        (["tp=2", "--force"], "--force needs a file"),
    ],
)
def test_bad_calls(in_process, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.svg").write_text("mine")
    done = in_process("draw", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in " ".join(done.stderr.split())
    assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]


# Outside a job, the advice is what a shell takes.
def test_live_outside_a_job(in_process):
    pytest.importorskip("torch")
    done = in_process("draw", "tp=2", "--on", "live")
    assert (done.returncode, done.stdout) == (2, "")
    assert "torchrun --no-python" in done.stderr
    assert "rank=" not in done.stderr


# Several --on tell one machine: the first names the hosts, the next says in which domain they are.
def test_several_on(in_process, tmp_path):
    hosts, switches = tmp_path / "hosts", tmp_path / "switches.json"
    hosts.write_text("b slots=2\na slots=2\n")
    switches.write_text('{"a": "s1", "b": "s2"}')
    done = in_process("draw", "tp=2,dp=2", "--on", str(hosts), "--on", str(switches))
    assert (done.returncode, done.stderr) == (0, "")
    heads = [line.split() for line in done.stdout.splitlines()]
    assert ["s2", "s1"] in heads
    assert ["b", "a"] in heads


# A file is replaced where that is asked for.
def test_force(in_process, tmp_path):
    file = tmp_path / "grid.svg"
    file.write_text("mine")
    assert in_process("draw", "tp=2", "-o", str(file), "--force").returncode == 0
    assert ET.parse(file).getroot().tag.endswith("svg")


# The figures to reach, of whole processes: seconds by ranks.
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["svg", "html"])
@pytest.mark.parametrize(
    ("sizes", "limit_s"),
    [("tp=8,dp=16,pp=8", 2), ("tp=8,dp=512,pp=16", 10), ("tp=8,dp=8192,pp=16", 20)],
)
def test_speed(tmp_path, sizes, limit_s, kind):
    file = tmp_path / f"grid.{kind}"
    command = [sys.executable, "-m", "hypercomm", "draw", sizes, "-o", str(file)]
    taken = []
    for _ in range(3):  # the first may find its files cold
        file.unlink(missing_ok=True)
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        taken.append(time.perf_counter() - start)
    assert min(taken) < limit_s
    assert file.stat().st_size < 2_000_000
