"""Test that the release check passes only if version, changelog, wheel and tag agree."""

import subprocess
import zipfile
from pathlib import Path

import pytest
from processes import run_python

SCRIPT = Path(__file__).parent.parent / ".ci/release"
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2026-01-31\n\n### Added\n\n- All.\n"


def git(root, *arguments):
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def release(root, changelog=CHANGELOG, wheel="1.2.3", tag="v1.2.3"):
    """Make a repository of three files, and run the release check on it."""
    for name, text in {
        "hypercomm/version.py": '__version__ = "1.2.3"\n',
        "CHANGELOG.md": changelog,
        ".ci/release": SCRIPT.read_text(),
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    git(root, "init")
    git(root, "add", ".")
    git(root, "commit", "-m", "all")
    if tag:
        git(root, "tag", tag)
    archive = root / f"hypercomm-{wheel}-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr(f"hypercomm-{wheel}.dist-info/METADATA", f"Name: x\nVersion: {wheel}\n")
    return run_python(root / ".ci/release", archive)


def test_release_is_ready(tmp_path):
    done = release(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "hypercomm 1.2.3: version, changelog, wheel and tag agree\n"


@pytest.mark.full
@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"wheel": "1.2.2"}, "its metadata says 1.2.2, and the package 1.2.3"),
        ({"tag": None}, "this commit has no tag v1.2.3 (it has none)"),
        ({"tag": "v1.2.2"}, "this commit has no tag v1.2.3 (it has v1.2.2)"),
        ({"changelog": "# Changelog\n"}, "does not begin with ## [Unreleased]"),
        ({"changelog": "## [Unreleased]\n"}, "the newest release is none"),
        ({"changelog": CHANGELOG.replace("1.2.3", "1.2.2")}, "the newest release is 1.2.2"),
        ({"changelog": CHANGELOG.replace(" - 2026-01-31", "")}, "has no date"),
        ({"changelog": CHANGELOG.replace("d]\n", "d]\n- new\n", 1)}, "[Unreleased] is not empty"),
    ],
)
def test_differences_are_reported(tmp_path, odd, message):
    done = release(tmp_path, **odd)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stdout == "hypercomm 1.2.3: not ready\n"


def test_usage_without_a_wheel():
    done = run_python(SCRIPT)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
