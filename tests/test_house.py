"""The house rules of design.md, read off the source and off fresh processes."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import fresh_programs
import pytest
from architecture import BEGIN, END, PAGE, House, tree_of, with_drawing

import hypercomm
from hypercomm import errors
from hypercomm.process_groups.c10d.self_checks import OLDEST, since

PACKAGE = Path(hypercomm.__file__).parent
HOUSE = House(PACKAGE)
SOURCES = list(HOUSE.modules.values())
module_of, imports_of = HOUSE.name_of, HOUSE.imports_of
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages([str(PACKAGE)], "hypercomm.")
    if not module.name.endswith("__main__")
)

# From the ground up: a module may import from its own floor and from those below. The longest name
# that fits is a module's floor; `hypercomm` itself has none: it resolves names when they are used.
FLOORS = [
    ("hypercomm.errors",),
    ("hypercomm.layout.reading",),
    ("hypercomm.layout.numbering",),
    ("hypercomm.layout.groups",),
    ("hypercomm.tools.place",),
    ("hypercomm.draw",),
    ("hypercomm.layout.rank_layout",),
    ("hypercomm.layout",),
    ("hypercomm.launch",),
    ("hypercomm.blame",),
    ("hypercomm.process_groups.c10d",),
    ("hypercomm.process_groups.job", "hypercomm.process_groups.world"),
    ("hypercomm.process_groups.options",),
    ("hypercomm.process_groups.agreement",),
    ("hypercomm.process_groups.creation",),
    ("hypercomm.process_groups",),
    ("hypercomm.joining",),
    ("hypercomm.connections",),
    ("hypercomm.watch",),
    ("hypercomm.transfers",),
    ("hypercomm.grid",),
    ("hypercomm.grid_set",),
    ("hypercomm.training",),
    ("hypercomm.compat.module_state", "hypercomm.compat.public_groups"),
    ("hypercomm.compat.replacement",),
    ("hypercomm.compat.megatron.releases",),
    ("hypercomm.compat.megatron.groups",),
    ("hypercomm.compat.megatron.state",),
    ("hypercomm.compat",),
    ("hypercomm.testing",),
    ("hypercomm.cli",),
]
ROOMS_WITHOUT_TORCH = tuple(f"hypercomm.{room}" for room in ("layout", "draw", "blame"))
TORCH_FREE = [
    "hypercomm",
    *(name for name in MODULES if name.startswith(ROOMS_WITHOUT_TORCH)),
]
LONGEST = 400
"""Lines of a file, but for lists of names: `LISTS`."""
LISTS = {"hypercomm.compat.megatron.parallel_state"}
MOST_FILES = 10
"""Files of a folder, its __init__ aside."""


def floor_of(module):
    heights = [
        (len(name), height)
        for height, names in enumerate(FLOORS)
        for name in names
        if module == name or module.startswith(f"{name}.")
    ]
    return max(heights)[1] if heights else None


# Imports run downwards only, also those inside a function or for types.
def test_imports_run_downwards():
    floors = {
        source: floor_of(module_of(source))
        for source in SOURCES
        if source.parent != PACKAGE or source.stem not in {"__init__", "__main__"}
    }
    assert [module_of(source) for source, here in floors.items() if here is None] == []
    up = {
        module_of(source): [
            name for name in imports_of(source) if name != "hypercomm" and floor_of(name) > here
        ]
        for source, here in floors.items()
    }
    assert {module: names for module, names in up.items() if names} == {}


# The map of floors can fail: it knows up from down.
def test_floors_have_an_order():
    rooms = ("hypercomm.layout.numbering.axes", "hypercomm.layout", "hypercomm.grid.view")
    assert [floor_of(room) for room in rooms] == sorted({floor_of(room) for room in rooms})
    assert "hypercomm.layout" in set(imports_of(PACKAGE / "grid" / "hyper_comm_grid.py"))


def circles(graph):
    """What is left when modules that import nothing of it are taken away, again and again."""
    left = {name: set(imported) & set(graph) - {name} for name, imported in graph.items()}
    while free := {name for name, imported in left.items() if not imported & set(left)}:
        left = {name: imported for name, imported in left.items() if name not in free}
    return left


# No module imports one that imports it, by however many steps.
def test_no_circles():
    graph = {
        module_of(source): set(imports_of(source)) - {"hypercomm"}
        for source in SOURCES
        if module_of(source) != "hypercomm"
    }
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}).keys() == {"a", "b", "c"}
    assert circles(graph) == {}


# A folder's listing is its table of contents, and a file is read in one sitting.
def test_sizes_of_rooms():
    lines = {module_of(source): len(source.read_text().splitlines()) for source in SOURCES}
    assert {name for name, count in lines.items() if count > LONGEST} <= LISTS
    folders = Counter(source.parent for source in SOURCES if source.stem != "__init__")
    assert {folder.name for folder, count in folders.items() if count > MOST_FILES} == set()


def loads_torch(statement):
    program = f"import sys\n{statement}\nsys.exit(3 if 'torch' in sys.modules else 0)"
    return subprocess.run([sys.executable, "-c", program], check=False).returncode == 3


# `import hypercomm` and the whole ground floor work without torch ...
def test_the_ground_floor_does_not_load_torch():
    statements = "\n".join(f"import {name}" for name in TORCH_FREE)
    use = "from hypercomm import RankLayout; RankLayout.parse('tp=2,dp=4').groups('dp').of(3)"
    assert not loads_torch(f"{statements}\n{use}")


# ... even where torch cannot be imported at all ...
def test_the_ground_floor_needs_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        + "\n".join(f"import {name}" for name in TORCH_FREE)
        + "\nfrom hypercomm import RankLayout; print(list(RankLayout.parse('dp=2').groups('dp')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[(0, 1)]\n", done.stderr


# ... and the tests above can fail: the grid does load it.
def test_the_grid_loads_torch():
    program = "import sys; sys.modules['torch'] = None; from hypercomm import HyperCommGrid"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "ModuleNotFoundError: import of torch halted" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.endswith(
        "MissingPackageError: hypercomm.HyperCommGrid needs torch: pip install torch"
    )
    assert loads_torch("import types; sys.modules['torch'] = types.ModuleType('torch')")


# Private names of torch are used in one folder only.
def test_private_names_of_torch_stay_in_c10d():
    private = [
        f"{module_of(source)}: {node.value.id}.{node.attr}"
        for source in SOURCES
        if source.parent.name != "c10d"
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in {"dist", "torch"}
        and (node.attr.startswith("_") or node.attr == "distributed_c10d")
    ]
    assert private == []


# `python -O` removes assert, so no check stands on one.
def test_no_assert():
    assert [
        f"{module_of(source)}:{node.lineno}"
        for source in SOURCES
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.Assert)
    ] == []


def public_things(module):
    """Public classes, functions and methods that a module defines."""
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        yield f"{module.__name__}.{name}", value
        if isinstance(value, type):
            for attribute, member in vars(value).items():
                if not attribute.startswith("_") and (
                    callable(member) or isinstance(member, (property, classmethod, staticmethod))
                ):
                    yield f"{module.__name__}.{name}.{attribute}", member


# Everything public says what it is.
@pytest.mark.parametrize("name", MODULES)
def test_public_names_have_docstrings(name):
    module = importlib.import_module(name)
    assert module.__doc__
    silent = [
        where
        for where, thing in public_things(module)
        if not (getattr(thing, "__doc__", None) or "").strip()
    ]
    overrides = {"group_size", "locate", "members", "to_array", "results"}
    assert [where for where in silent if where.rpartition(".")[2] not in overrides] == []


NEED_TORCH = {"hypercomm.testing.local": "2.10"}
"""Modules whose examples need a newer torch than the oldest."""


# Every example in a docstring runs and says what it prints.
@pytest.mark.long
@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    if not since(NEED_TORCH.get(name, OLDEST)):
        pytest.skip(f"its examples need torch {NEED_TORCH[name]}")
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


# The public names resolve, and no other does.
def test_public_names():
    for name in hypercomm.__all__:
        assert getattr(hypercomm, name) is not None
        assert name in dir(hypercomm)
    with pytest.raises(AttributeError, match="has no attribute 'HyperComGrid'"):
        hypercomm.HyperComGrid  # noqa: B018


# So do the errors, all of them, and the packages, of which none loads torch before it must.
def test_errors_and_packages_at_the_top():
    assert set(errors.__all__) <= set(hypercomm.__all__)
    assert all(getattr(hypercomm, name) is getattr(errors, name) for name in errors.__all__)
    packages = ["cli", "compat", "errors", "launch", "layout", "testing"]
    lines = "; ".join(f"hypercomm.{name}.__name__" for name in packages)
    assert not loads_torch(f"import hypercomm; {lines}; hypercomm.GridMismatchError")
    use = "import hypercomm; print(hypercomm.layout.pipelines.__name__, hypercomm.compat.megatron)"
    done = fresh_programs.run(use)
    assert done.stdout.startswith("hypercomm.layout.pipelines <module 'hypercomm.compat.megatron'")


# The drawing in CONTRIBUTING.md is that of the imports: `python tests/architecture.py --write`.
def test_drawing_of_the_rooms():
    page = PAGE.read_text()
    assert BEGIN in page
    assert END in page
    assert page == with_drawing(page, HOUSE.drawing())


# A house whose drawing can be made by hand: `roof` is on `hall`, which has two rooms, and both are
# on `ground`; when `ground` imports `hall`, too, that is said to be against the order.
def test_drawing_of_a_toy(tmp_path):
    files = {
        "toy/__init__.py": '"""The toy."""',
        "toy/__main__.py": "import toy.roof",
        "toy/roof.py": '"""The roof."""\nimport toy.ground\nfrom toy.hall import upper',
        "toy/hall/__init__.py": '"""The hall.\n\nAnd more.\n"""\nfrom toy.ground import thing',
        "toy/hall/upper/__init__.py": '"""Upper."""\n\ndef f():\n    import toy.hall.lower.file',
        "toy/hall/lower/__init__.py": '"""Lower."""',
        "toy/hall/lower/file.py": '"""No room."""',
        "toy/ground.py": '"""The ground."""\nfrom os import path',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    rows = [("roof.py", "The roof."), ("", "on hall, ground"), ("hall/", "The hall.")]
    rows += [("", "on ground"), ("  upper/", "Upper."), ("  lower/", "Lower.")]
    drawn = [f"{name:20}{says}" for name, says in [*rows, ("ground.py", "The ground.")]]
    assert House(tmp_path / "toy").drawing().splitlines() == drawn
    (tmp_path / "toy/ground.py").write_text('"""The ground."""\nimport toy.hall.upper')
    drawn += [f"{'':20}and up, on hall"]
    assert House(tmp_path / "toy").drawing().splitlines() == drawn


# What CONTRIBUTING.md points at is there.
def test_places_that_the_page_names():
    places = re.findall(r"`((?:hypercomm|tests|benchmarks|\.ci)/[\w./]+)`", PAGE.read_text())
    assert len(places) > 10
    assert [place for place in places if not (PAGE.parent / place).exists()] == []
