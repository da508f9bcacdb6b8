"""Test that the README's program prints the output shown, and that CI runs the commands."""

import re
from pathlib import Path

import page_runner

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


# The program prints the output that the README shows.
def test_program_prints_what_is_shown(tmp_path):
    assert page_runner.run_page(README, tmp_path) == 1


# The commands for the setup are at the top, and CI reads them from there.
def test_ci_runs_the_commands():
    commands = [line.split("#")[0].strip() for line in README.read_text().splitlines()[:12]]
    assert "pip install '.[cli]' && hypercomm check tp=2,cp=2,dp=2" in commands
    assert "pip install '.[cli,test]' && pytest" in commands
    asked = re.findall(r'readme_command "(.+)"', (ROOT / ".ci" / "run").read_text())
    assert len(asked) == 3
    assert all(any(line.startswith(command) for line in commands) for command in asked)


# The machine of the README splits 12 of 16 `dp` groups. With domains of 64 GPUs, no group is split.
def test_place_shows_what_the_readme_says(in_process):
    command = "place tp=4,dp=16,pp=4 --on 4,72"
    assert f"`hypercomm {command}` shows that 12 of 16 `dp` groups" in README.read_text()
    assert re.search(r"^dp +domain +12 of 16 ", in_process(*command.split()).stdout, re.MULTILINE)
    smaller = command.replace("4,72", "4,64").split()
    assert re.search(r"^dp +domain +0 of 16 ", in_process(*smaller).stdout, re.MULTILINE)


# The README has at most 60 lines, and every link leads to a file.
def test_size_and_links():
    text = README.read_text()
    assert len(text.splitlines()) <= 60
    targets = re.findall(r"\]\(([^)\s#]+)", text)
    assert [target for target in targets if not (ROOT / target).exists()] == []
