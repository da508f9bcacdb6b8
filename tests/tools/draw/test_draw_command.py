"""`hypercomm draw`: output in a terminal, files, and time."""

import time

import pytest

from hypercomm import RankLayout, RankMapping, draw
from hypercomm.layout.difference import difference

pytestmark = pytest.mark.torch_free
LAYOUT, OTHER = RankLayout("tp=2,dp=4"), RankLayout("tp=4,dp=2")
LARGE = RankLayout("tp=4,dp=4")


def test_output_in_a_terminal(in_process, monkeypatch):
    done = in_process("draw", "tp=2,dp=4")
    assert (done.returncode, done.stderr) == (0, "")
    text = draw(LAYOUT, on="8").text(width=120, color=False)
    lines = [line.rstrip() for line in done.stdout.rstrip().splitlines()]
    assert lines == text.splitlines()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in in_process("draw", "tp=4,dp=4,pp=2").stdout


@pytest.mark.parametrize(
    ("arguments", "picture"),
    [
        (["tp=2,dp=4", "--on", "4"], draw(LAYOUT, on="4")),
        (["tp=2,dp=4", "--on", "none", "--groups", "dp"], draw(LAYOUT, groups="dp")),
        (["tp=2,dp=-1", "tp=4,dp=2"], draw(difference(LAYOUT, OTHER), on="8")),
        (["tp=2,dp=4", "--to", "tp=4,dp=-1"], draw(RankMapping(LAYOUT, OTHER))),
        (["tp=2,dp=-1", "--world-size", "8", "--on", "4"], draw(LAYOUT, on="4")),
        (
            ["tp=2,dp=-1", "--to", "tp=4,dp=4", "--world-size", "8"],
            draw(RankMapping(LAYOUT, LARGE)),
        ),
        (["tp=2,dp=4", "tp=4,dp", "--world-size", "16"], draw(difference(LAYOUT, LARGE), on="8")),
    ],
)
def test_output_to_a_file(in_process, tmp_path, arguments, picture):
    file = tmp_path / "picture.svg"
    done = in_process("draw", *arguments, "-o", str(file))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{file}\n", "")
    assert file.read_text(encoding="utf-8") == picture.svg()
    assert in_process("draw", *arguments, "-o", str(file)).returncode == 2
    assert in_process("draw", *arguments, "-o", str(file), "--force").returncode == 0


# A picture of two million ranks takes as long as one of sixteen thousand: at most two seconds of
# CPU time.
@pytest.mark.full
@pytest.mark.parametrize("sizes", ["tp=8,cp=2,dp=256,pp=4", "tp=8,cp=2,dp=262144,pp=4"])
def test_time_does_not_grow_with_ranks(sizes):
    start = time.process_time()
    assert draw(sizes, on=8).svg().startswith("<svg")
    assert time.process_time() - start < 2
