"""Test that the site's tables and pictures are up to date, and that its reference is complete.

MkDocs checks links, anchors and the navigation, as `validation:` in mkdocs.yml requests.
"""

import ast
import importlib
import importlib.util
import json
import re
import shutil

import attrs
import page_runner as runner
import pytest
from processes import run_python
from tools.blame.dumps import Dumps

import hypercomm
from hypercomm import errors
from hypercomm.cli.doctor import Report

ROOT = runner.ROOT
DOCS = runner.DOCS
PAGES = runner.pages()


def module_of_docs(name):
    """Import a script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_the_site", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = module_of_docs("tables")


# The site loads nothing from other servers.
def test_site_loads_nothing_external():
    configuration = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in configuration
    assert "http" not in configuration


# The generated tables must be up to date. If this fails, run `python docs/tables.py --write`.
@pytest.mark.parametrize("name", PAGES)
def test_tables_are_up_to_date(name):
    page = PAGES[name].read_text()
    assert TABLES.with_tables(page) == page


def test_tables_are_all_used():
    used = {name for path in PAGES.values() for name in TABLES._PART.findall(path.read_text())}
    assert {name for _, name, _ in used} == {"shown", *TABLES.PARTS}


# Each page of the reference shows its public names and a link to the source, even to readers who
# open the Markdown files without the site.
def test_the_reference_without_a_site():
    for name, path in PAGES.items():
        page = path.read_text()
        if name.startswith("reference/") and "\n::: " in page and name != "reference/errors.md":
            assert "<!-- shown, by docs/tables.py -->" in page, name
            assert re.search(r'<p class="raw">Source: (<a href="\S+">\S+</a>(, )?)+</p>', page), (
                name
            )


# In the Markdown files, a link follows each program that the page includes.
def test_links_for_readers_of_the_files():
    included = 0
    for name, path in PAGES.items():
        page = path.read_text()
        for file, rest in re.findall(r'^--8<-- "(\S+)"\n(?:```\n)?\n(.*)', page, re.MULTILINE):
            included += 1
            assert rest.startswith('<p class="raw">'), (name, file)
            assert file in rest, (name, file)
        assert page.count("--8<--") == len(re.findall(r"^--8<--", page, re.MULTILINE)), name
        links = re.findall(r'<p class="raw">.*', page)
        for link in re.findall(r'href="(\S+)"', " ".join(links)):
            assert (path.parent / link).is_file(), (name, link)
    assert included > 8
    assert ".raw { display: none }" in (DOCS / "pictures" / "site.css").read_text()


# If another copy of hypercomm is installed, the tables and the tests still use the checkout.
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
    # If pytest cannot use the checkout, it stops and names both folders.
    words = *words, "-o", f"pythonpath={ROOT / 'tests'}"
    done = run_python(*words, folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 4
    assert f"hypercomm is imported from {tmp_path}" in done.stderr
    assert "run pip install -e '.[cli,test]' there" in done.stderr


# The pictures must be up to date. If this fails, run `python docs/drawings.py --write`.
def test_pictures_are_up_to_date():
    drawings = module_of_docs("drawings")
    for name, draw in drawings.PICTURES.items():
        assert (drawings.FOLDER / f"{name}.svg").read_text() == draw().svg(), name
    files = {path.stem for path in drawings.FOLDER.glob("*.svg")}
    assert files == set(drawings.PICTURES)
    assert len([name for name in files if name.startswith("layout_")]) == 10  # how-to/layouts.md
    pages = "".join(path.read_text() for path in PAGES.values())
    assert all(f"pictures/{name}.svg)" in pages for name in files)


# Without animation, the picture of the README shows the first of its groups and no other.
def test_first_frame_of_the_picture():
    svg = (DOCS / "pictures" / "groups.svg").read_text()
    style = svg.partition("<style>")[2].partition("</style>")[0]
    static = re.sub(r"@keyframes [\w-]+\{(?:[^{}]*\{[^}]*\})*[^{}]*\}", "", style)
    assert "keyframes" in style
    assert "opacity" not in static
    assert re.findall(r'<g class="phase" opacity="(\d)"', svg) == ["1", "0", "0", "0"]


# The table has every error, with a builtin base, a cause and a fix.
def test_table_has_every_error():
    rows = re.findall(
        r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", TABLES.error_table(), re.MULTILINE
    )
    assert [name for name, *_ in rows] == sorted(errors.__all__)
    assert [name for name, _, cause, fix in rows if not (cause and fix[0].isupper())] == []


def objects_of_the_reference():
    """Yield the objects behind `:::` in the reference, and the listed members of modules."""
    for name, path in PAGES.items():
        if not name.startswith("reference/"):
            continue
        asked = re.findall(r"^::: ([\w.]+)(?:\n    (.+))?", path.read_text(), re.MULTILINE)
        for target, options in asked:
            thing = TABLES.resolved(target)
            yield thing
            members = re.search(r"members: \[(.*?)\]", options)
            if members:
                yield from (getattr(thing, member) for member in members[1].split(", "))
            elif not isinstance(thing, type) and hasattr(thing, "__path__"):
                yield from (getattr(thing, member) for member in thing.__all__)
            elif not isinstance(thing, type) and hasattr(thing, "__spec__"):
                yield from (value for key, value in vars(thing).items() if not key.startswith("_"))


# Every public name of the package and of its public modules is in the reference.
def test_public_names_are_in_the_reference():
    there = list(objects_of_the_reference())
    assert len(there) > 60
    missing = [
        f"{module}.{name}"
        for module in TABLES.PUBLIC
        for name in TABLES.names_of(module)
        if not name.startswith("__") and name not in errors.__all__ and name not in TABLES._MODULES
        if not any(getattr(importlib.import_module(module), name) is thing for thing in there)
    ]
    assert not missing
    page = PAGES["reference/index.md"].read_text()
    listed = re.findall(r"^\| \[`(\w+)`\]\(\S+\) \|", page, re.MULTILINE)
    assert page.count("\n| `") == 0  # each name is a link
    public = set(hypercomm.__all__) - set(errors.__all__) - {"__version__"}
    assert public <= set(listed)


# The reference lists the names of every package that has public names; `process_groups` has none.
def test_reference_covers_all_public_packages():
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "hypercomm").rglob("__init__.py")
        if re.search(r"^__all__", path.read_text(), re.MULTILINE)
        and "process_groups" not in path.parts
    }
    assert packages <= set(TABLES.PUBLIC)


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
    page = PAGES["reference/cli.md"].read_text()
    section = page.partition("## JSON")[2].partition(f"### {command}\n")[2].partition("\n### ")[0]
    for cell in re.findall(r"^\| (`.+?) \|", section, re.MULTILINE):
        before = ""
        for key in re.findall(r"`([^`]+)`", cell):
            full = before.rpartition(".")[0] + key if key.startswith(".") else key
            before = full
            yield full


def printed_json(*arguments):
    return json.loads(run_python("-m", "hypercomm", *arguments, "--json").stdout)


# The page lists exactly the keys of the JSON that a command prints.
@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "nested"),
    [
        (("place", "tp=2,dp=2", "--on", "2"), ("groups[].", "cost.")),
        (("diff", "tp=2,dp=2", "tp=4"), ("changes[].",)),
        (("plan", "tp=2,dp=2"), ("groups[].",)),
        (("check", "tp=2"), ("groups[].",)),
        pytest.param(("doctor",), (), marks=pytest.mark.clients),
    ],
)
def test_json_keys_are_documented(arguments, nested):
    found = {
        key
        for key in keys_of(printed_json(*arguments))
        if key.count(".") == 0 or key.startswith(nested or ("-",))
    }
    assert found == set(documented(arguments[0]))


# The page also lists the keys of blame. `groups[].waits[]` has the same keys as
# `findings[].calls[]`.
@pytest.mark.torch_free
def test_json_keys_of_blame_are_documented(tmp_path):
    dumps = Dumps(3)
    for rank in range(2):
        dumps.call(rank, "WORLD", state="runs")
    printed = set(keys_of(printed_json("blame", str(dumps.write(tmp_path)))))
    calls, waits = (
        {key.removeprefix(path) for key in printed if key.startswith(path)}
        for path in ("findings[].calls[].", "groups[].waits[].")
    )
    assert calls == waits
    found = {key for key in printed if not key.startswith("groups[].waits[].")}
    assert found == set(documented("blame"))


# The page also lists the keys of doctor, which are the fields of its report and `ok`.
def test_json_keys_of_doctor_are_documented():
    names = {field.name for field in attrs.fields(Report)}
    assert {key for key in documented("doctor") if "[" not in key} == {"ok", *names}


FAMILIES = (
    "HYPERCOMM",
    "TORCH",
    "NCCL",
    "GLOO",
    "CUDA",
    "UCX",
    "UCC",
    "OMP",
    "SLURM",
    "OMPI",
    "PMI",
    "PMIX",
    "MPI",
    "PALS",
    "FLUX",
    "PET",
    "MV2",
    "JSM",
    "MASTER",
    "RAY",
    "TORCHELASTIC",
)
"""Prefixes of the environment variables that the code reads or sets."""


# The tables list exactly the environment variables in the code.
def test_environment_variables_are_documented():
    name = re.compile(rf"(?:{'|'.join(FAMILIES)})(?:_[A-Z0-9]+)+|LOCAL_RANK|GROUP_RANK")
    read = {
        node.value
        for path in (ROOT / "hypercomm").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and name.fullmatch(node.value)
    }
    page = re.findall(r"`(\w+)`", PAGES["reference/environment.md"].read_text())
    assert sorted(read - set(page) - NO_VARIABLES) == []
    assert sorted({word for word in page if name.fullmatch(word)} - read) == []


NO_VARIABLES = {"CUDA_GRAPHS"}
"""Words in the code that look like environment variables, but are not."""
