"""The house rules of design.md, read off the source and off fresh processes."""

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hypercomm

PACKAGE = Path(hypercomm.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages([str(PACKAGE)], "hypercomm.")
    if not module.name.endswith("__main__")
)

# From the ground up: a module may import from its own floor and from those below.
FLOORS = [
    ("hypercomm.errors",),
    ("hypercomm.layout",),
    ("hypercomm.process_groups", "hypercomm.launch", "hypercomm.local_rank"),
    ("hypercomm.device_mesh", "hypercomm.preload"),
    ("hypercomm.grid",),
    ("hypercomm.compat.module_state", "hypercomm.compat.replacement"),
    ("hypercomm.compat",),
    ("hypercomm.grid_set", "hypercomm.presets"),
    ("hypercomm.testing",),
    ("hypercomm.cli",),
]
# What moves tensors is loaded when one is moved: an import inside a method.
STEPS_UP = {("hypercomm.layout.mapping", "hypercomm.process_groups.transfer")}
TORCH_FREE = ["hypercomm", *(name for name in MODULES if name.startswith("hypercomm.layout"))]


def floor_of(module):
    for height, names in enumerate(FLOORS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return height
    return None


def imports_of(source):
    """The modules of ours that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("hypercomm"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hypercomm"):
            yield node.module
            yield from (
                f"{node.module}.{name.name}"
                for name in node.names
                if f"{node.module}.{name.name}" in MODULES
            )


def module_of(source):
    parts = source.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


# Imports run downwards only. The two modules at the top level that stand outside the house,
# __init__ (lazy names) and __main__ (the script), are above all of it.
@pytest.mark.parametrize("source", SOURCES, ids=module_of)
def test_imports_run_downwards(source):
    here = floor_of(module_of(source))
    if source.parent == PACKAGE and source.stem in {"__init__", "__main__"}:
        return
    assert here is not None, f"{module_of(source)} has no floor"
    for imported in imports_of(source):
        if imported != "hypercomm" and (module_of(source), imported) not in STEPS_UP:
            assert floor_of(imported) <= here, f"{module_of(source)} imports {imported}"


# The map of floors can fail: it knows up from down.
def test_floors_have_an_order():
    assert (
        floor_of("hypercomm.layout.axes") < floor_of("hypercomm.grid") < floor_of("hypercomm.cli")
    )
    assert "hypercomm.layout" in set(imports_of(PACKAGE / "grid" / "hyper_comm_grid.py"))


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


# ... and the test above can fail: the grid does load it.
@pytest.mark.long
def test_the_grid_loads_torch():
    assert loads_torch("from hypercomm import HyperCommGrid")


# Private names of torch are used in one folder only.
@pytest.mark.parametrize("source", SOURCES, ids=module_of)
def test_private_names_of_torch_stay_in_c10d(source):
    private = [
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in {"dist", "torch"}
        and (node.attr.startswith("_") or node.attr == "distributed_c10d")
    ]
    assert not private or source.parent.name == "c10d"


# `python -O` removes assert, so no check stands on one.
@pytest.mark.parametrize("source", SOURCES, ids=module_of)
def test_no_assert(source):
    assert not [
        node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Assert)
    ]


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


# Every example in a docstring runs and says what it prints.
@pytest.mark.long
@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


# The public names resolve, and no other does.
def test_public_names():
    for name in hypercomm.__all__:
        assert getattr(hypercomm, name) is not None
        assert name in dir(hypercomm)
    with pytest.raises(AttributeError, match="has no attribute 'HyperComGrid'"):
        hypercomm.HyperComGrid  # noqa: B018
