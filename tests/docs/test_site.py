"""Test that the site's tables and pictures are up to date, and that its reference is complete.

MkDocs checks links, anchors and the navigation, as `validation:` in mkdocs.yml requests.
"""

import importlib
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
from processes import run_python
from tools.blame.dumps import Dumps

import hypercomm
from hypercomm import errors

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path for path in DOCS.rglob("*.md")}
TEXTS = {name: path.read_text() for name, path in PAGES.items()}


def module_of_docs(name):
    """Import a script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_the_site", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = module_of_docs("tables")


# The commands for the setup are at the top of the README, and CI reads them from there.
def test_ci_runs_the_commands_of_the_readme():
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
def test_size_and_links_of_the_readme():
    text = README.read_text()
    assert len(text.splitlines()) <= 60
    targets = re.findall(r"\]\(([^)\s#]+)", text)
    assert [target for target in targets if not (ROOT / target).exists()] == []


# The site loads nothing from other servers.
def test_site_loads_nothing_external():
    configuration = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in configuration
    assert "http" not in configuration


# The generated tables are up to date. If this fails, run `python docs/tables.py --write`. The table
# of names links each public name to the reference.
def test_tables_are_up_to_date():
    assert [name for name, page in TEXTS.items() if TABLES.with_tables(page) != page] == []
    used = {part[1] for page in TEXTS.values() for part in TABLES._PART.findall(page)}
    assert used == {"shown", *TABLES.PARTS}
    listed = re.findall(r"^\| (\[?)`(\w+)`", TEXTS["reference/index.md"], re.MULTILINE)
    assert [name for link, name in listed if not link] == []
    public = set(hypercomm.__all__) - set(errors.__all__) - {"__version__"}
    assert public <= {name for _, name in listed}


# The table of errors has a cause and a fix for each.
def test_table_has_every_error():
    row = re.compile(r"^\| `(\w+)` \|.*\| (.*) \| (.*) \|$", re.MULTILINE)
    rows = row.findall(TEXTS["reference/errors.md"])
    assert [name for name, *_ in rows] == errors.__all__
    assert [name for name, cause, fix in rows if not (cause and fix[:1].isupper())] == []


# The table of names covers every package that has public names; `process_groups` has none.
def test_reference_covers_all_public_packages():
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "hypercomm").rglob("__init__.py")]
    names = [".".join(folder.parts) for folder in folders if "process_groups" not in folder.parts]
    packages = {name for name in names if getattr(importlib.import_module(name), "__all__", ())}
    assert packages <= set(TABLES.PUBLIC)


# In the Markdown files, a link follows each program that a page includes, and each page of the
# reference links to the source.
def test_links_for_readers_of_the_files():
    assert ".raw { display: none }" in (DOCS / "pictures" / "site.css").read_text()
    programs = 0
    for name, page in TEXTS.items():
        links = re.findall(r'<p class="raw">.*', page)
        files = re.findall(r'href="(\S+)"', " ".join(links))
        assert [file for file in files if not (PAGES[name].parent / file).is_file()] == [], name
        included = re.findall(r'^--8<-- "(\S+)"\n(?:```\n)?\n(.*)', page, re.MULTILINE)
        assert all(link in links and file in link for file, link in included), name
        assert len(included) == page.count("--8<--"), name
        programs += len(included)
        if name.startswith("reference/") and "\n::: " in page and name != "reference/errors.md":
            assert '<p class="raw">Source: <a ' in page, name
    assert programs > 8


# If another copy of hypercomm is installed, the tables and the tests still use the checkout. If
# pytest cannot use it, it stops.
@pytest.mark.full
def test_tests_and_tables_use_the_checkout(tmp_path):
    shutil.copytree(ROOT / "hypercomm", tmp_path / "hypercomm")
    program = f"import runpy; runpy.run_path({str(DOCS / 'tables.py')!r}); import hypercomm as h"
    done = run_python("-c", f"{program}; print(h.__file__)", PYTHONPATH=str(tmp_path))
    assert done.stdout.startswith(str(ROOT)), done.stderr
    test = ROOT / "tests" / "layout" / "test_views.py"
    words = "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", test
    done = run_python(*words, folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    words = *words, "-o", f"pythonpath={ROOT / 'tests'}"
    done = run_python(*words, folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 4
    assert f"hypercomm is imported from {tmp_path}" in done.stderr


# The pictures are up to date and shown. If this fails, run `python docs/drawings.py --write`.
def test_pictures_are_up_to_date():
    drawings = module_of_docs("drawings")
    for name, draw in drawings.PICTURES.items():
        assert (drawings.FOLDER / f"{name}.svg").read_text() == draw().svg(), name
    files = {path.stem for path in drawings.FOLDER.glob("*.svg")}
    assert files == set(drawings.PICTURES)
    assert all(f"pictures/{name}.svg)" in "".join(TEXTS.values()) for name in files)


# Without animation, the picture of the README shows the first of its groups and no other.
def test_first_frame_of_the_picture():
    svg = (DOCS / "pictures" / "groups.svg").read_text()
    style = svg.partition("<style>")[2].partition("</style>")[0]
    static = re.sub(r"@keyframes [\w-]+\{(?:[^{}]*\{[^}]*\})*[^{}]*\}", "", style)
    assert "keyframes" in style
    assert "opacity" not in static
    assert re.findall(r'<g class="phase" opacity="(\d)"', svg) == ["1", "0", "0", "0"]


def keys_of(value, path=""):
    """Yield the paths of all keys of a JSON value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{path}{key}"
            yield from keys_of(inner, f"{path}{key}.")
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner, f"{path.removesuffix('.')}[].")


def documented(command):
    """Yield the key paths on the page for a command. `.x` is a sibling of the key before it."""
    section = TEXTS["reference/cli.md"].partition("## JSON")[2].partition(f"### {command}\n")[2]
    for cell in re.findall(r"^\| (`.+?) \|", section.partition("\n### ")[0], re.MULTILINE):
        before = ""
        for key in re.findall(r"`([^`]+)`", cell):
            before = before.rpartition(".")[0] + key if key.startswith(".") else key
            yield before


# The page lists exactly the keys of the JSON that a command prints, down to the nested objects
# whose keys are fixed. In blame, `groups[].waits[]` has the keys of `findings[].calls[]`.
@pytest.mark.parametrize(
    ("command", "nested"),
    [
        ("place tp=2,dp=2 --on 2", r"groups\[\]\.|cost\."),
        ("diff tp=2,dp=2 tp=4", r"changes\[\]\."),
        ("plan tp=2,dp=2", r"groups\[\]\."),
        ("blame .", r"(?!groups\[\]\.waits\[\]\.).*\."),
        pytest.param("check tp=2", r"groups\[\]\.", marks=pytest.mark.full),
        pytest.param("doctor", "-", marks=pytest.mark.full),
    ],
)
def test_json_keys_are_documented(command, nested, in_process, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dumps = Dumps(3)
    for rank in range(2):
        dumps.call(rank, "WORLD", state="runs")
    dumps.write(tmp_path)
    printed = set(keys_of(json.loads(in_process(*command.split(), "--json").stdout)))
    shown = {key for key in printed if "." not in key or re.match(nested, key)}
    assert shown == set(documented(command.split()[0]))
