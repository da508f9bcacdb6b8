"""Test rules for the whole package, on its source and in new processes.

import-linter checks which modules a module may import. Its rules are in pyproject.toml.
"""

import ast
import compileall
import doctest
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
import shutil
from pathlib import Path

import forked_programs
import pytest
from processes import run_python

import hypercomm

PACKAGE = Path(hypercomm.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages([str(PACKAGE)], "hypercomm.")
    if not module.name.endswith("__main__")
)
TORCH_FREE = [name for name in MODULES if re.match(r"hypercomm\.(layout|errors)", name)]
MOST_MODULES = 60
"""The number of hypercomm's modules that `from hypercomm import HyperCommGrid` may import."""


def loads_torch(statement):
    program = f"import sys\n{statement}\nsys.exit(3 if 'torch' in sys.modules else 0)"
    return run_python("-c", program).returncode == 3


GROUPS = "from hypercomm import RankLayout; print([*RankLayout('dp=2').groups('dp')])"


# `import hypercomm` and layouts work if torch cannot be imported.
def test_layouts_need_no_torch():
    names = ", ".join(TORCH_FREE)
    done = run_python("-c", f"import sys; sys.modules['torch'] = None\nimport {names}\n{GROUPS}")
    assert done.stdout == "[(0, 1)]\n", done.stderr


# Layouts also work if the package consists of compiled files, without their sources.
def test_compiled_files_need_no_sources(tmp_path):
    copy = tmp_path / "hypercomm"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(copy, quiet=2, legacy=True)
    for source in copy.rglob("*.py"):
        source.unlink()
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {GROUPS}"
    done = run_python("-c", f"{program}; import hypercomm; print(hypercomm.__file__)")
    assert done.stdout.split("\n")[:2] == ["[(0, 1)]", str(copy / "__init__.pyc")], done.stderr


# The grid imports torch. This shows that the test above can fail.
def test_grid_needs_torch():
    program = "import sys; sys.modules['torch'] = None; from hypercomm import HyperCommGrid"
    last = run_python("-c", program).stderr.splitlines()[-1]
    assert last.endswith("HyperCommGrid needs torch: pip install torch")
    assert loads_torch("import types; sys.modules['torch'] = types.ModuleType('torch')")


# A grid imports only the core: no tools, pictures or launchers.
@pytest.mark.full
def test_grid_imports_only_the_core():
    program = "import sys; from hypercomm import HyperCommGrid; print(*sys.modules)"
    names = run_python("-c", program).stdout.split()
    loaded = [name for name in names if name.partition(".")[0] == "hypercomm"]
    assert 20 < len(loaded) <= MOST_MODULES
    assert not any(re.match(r"hypercomm\.(tools|cli|testing|compat)", name) for name in loaded)


@functools.cache
def trees():
    """Parse each file of the package."""
    return {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


# Private names of torch are used only in torch_internals/, and in the simulated job.
def test_private_names_of_torch_are_in_one_folder():
    private = [
        f"{file}: {node.value.id}.{node.attr}"
        for file, tree in trees().items()
        if "torch_internals" not in file.parts and file != PACKAGE / "testing/simulated_job.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in {"dist", "torch"}
        and (node.attr.startswith("_") or node.attr == "distributed_c10d")
    ]
    assert private == []


def public_things(module):
    """Yield the public classes, functions and methods that a module defines."""
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


# Every public name has a docstring.
@pytest.mark.parametrize("name", MODULES)
def test_public_names_have_docstrings(name):
    module = importlib.import_module(name)
    assert module.__doc__
    silent = [
        where
        for where, thing in public_things(module)
        if not (getattr(thing, "__doc__", None) or "").strip()
    ]
    overrides = {"group_size", "locate", "members", "of", "to_array", "results"}
    assert [where for where in silent if where.rpartition(".")[2] not in overrides] == []


INSTALLERS = {"hypercomm.compat.megatron.install"}
"""Modules whose examples replace other modules. The other modules must not be imported before."""


# Every docstring example runs and prints the shown output.
@pytest.mark.parametrize("name", sorted({*MODULES} - INSTALLERS))
def test_docstring_examples(name):
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(INSTALLERS))
def test_docstring_examples_of_installers(name):
    program = f"import doctest, {name}, sys; exit(doctest.testmod(sys.modules[{name!r}]).failed)"
    done = forked_programs.run(program)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


# Public names can be imported, and an unknown name raises.
def test_public_names_can_be_imported():
    for package in (hypercomm, hypercomm.testing, hypercomm.launch, hypercomm.compat):
        stub = Path(package.__file__).with_suffix(".pyi").read_text()
        for name in re.findall(r"\bas (\w+)", stub):
            assert getattr(package, name) is not None
        assert {*package.__all__} <= {*dir(package)}
    assert "ranks_bound" in dir(hypercomm.testing)
    with pytest.raises(AttributeError, match="has no attribute 'HyperComGrid'"):
        hypercomm.HyperComGrid  # noqa: B018
    for name, home in hypercomm._ELSEWHERE.items():
        with pytest.raises(AttributeError, match=f"from {home} import {name}"):
            getattr(hypercomm, name)
        assert hasattr(importlib.import_module(home), name)


# Subpackages can be imported, and importing them does not import torch.
def test_subpackages_do_not_import_torch():
    packages = ["cli", "compat", "errors", "launch", "layout", "testing", "tools", "transfers"]
    lines = "; ".join(f"hypercomm.{name}.__name__" for name in packages)
    assert not loads_torch(f"import hypercomm; {lines}; hypercomm.errors.PlanMismatchError")
    assert len(dir(hypercomm)) <= 35
    for name in ("grid", "training"):
        assert getattr(hypercomm, name).__name__ == f"hypercomm.{name}"
        assert name in dir(hypercomm)
    done = forked_programs.run("import hypercomm; print(hypercomm.compat.megatron)")
    assert done.stdout.startswith("<module 'hypercomm.compat.megatron'")


# The paths that CONTRIBUTING.md names exist.
def test_paths_in_contributing_exist():
    paths = re.findall(r"`((?:hypercomm|tests|benchmarks|\.ci)/[\w./]+)`", CONTRIBUTING.read_text())
    assert len(paths) > 10
    assert [path for path in paths if not (CONTRIBUTING.parent / path).exists()] == []


def names_defined_in(tree):
    """Yield the names of the functions, classes, variables and attributes that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


# No module imports a private name of another module, or reads a private attribute that only other
# modules define. torch_internals is an exception: it reads private names of torch, which may be the
# same as names in hypercomm.
def test_private_names_stay_in_their_module():
    homes = {}
    for path, tree in trees().items():
        for name in names_defined_in(tree):
            homes.setdefault(name, set()).add(path)
    offenders = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hypercomm"):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and "torch_internals" not in path.parts:
                is_own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
                is_known = path in homes.get(node.attr, {path})
                names = [] if is_own or is_known else [node.attr]
            private = [name for name in names if re.match(r"_(?!_)", name)]
            offenders += [f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}" for name in private]
    assert offenders == []


# Every option of a call that creates groups is a parameter with a type, which `help()` shows.
@pytest.mark.parametrize("call", ["create_pg", "ensure_pg", "explain"])
def test_options_are_parameters(call):
    thing = getattr(hypercomm.HyperCommGrid, call)
    parameters = inspect.signature(thing).parameters
    options = {name: one for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    fields = inspect.signature(hypercomm.GroupRequest).parameters
    assert [*options] == [name for name, one in fields.items() if one.kind is one.KEYWORD_ONLY]
    assert all(one.annotation is not one.empty for one in options.values())
    assert not any(one.kind is one.VAR_KEYWORD for one in parameters.values())


NO_VARIABLES = {"EXPERT_MODEL", "EXPERT_TENSOR", "TENSOR_MODEL", "PIPELINE_MODEL"}
NO_VARIABLES |= {"SC_PHYS_PAGES", "SC_PAGE_SIZE"}
"""Words in the code that look like environment variables, but are not."""


# The page about environment variables has exactly the variables in the code.
def test_environment_variables_are_documented():
    name = re.compile(r"[A-Z]\w*_[A-Z0-9_]*[A-Z0-9]")
    nodes = itertools.chain(*map(ast.walk, trees().values()))
    words = {node.value for node in nodes if isinstance(node, ast.Constant)}
    read = {word for word in words if isinstance(word, str) and name.fullmatch(word)}
    text = (CONTRIBUTING.parent / "docs" / "reference" / "environment.md").read_text()
    page = {word for word in re.findall(r"`(\w+)`", text) if name.fullmatch(word)}
    assert sorted(read - NO_VARIABLES) == sorted(page)
