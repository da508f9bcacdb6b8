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


# The README fits on one and a half screens, and every link leads to a file.
def test_size_and_links():
    text = README.read_text()
    assert len(text.splitlines()) <= 65
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [target for target in targets if not (ROOT / target).exists()] == []
