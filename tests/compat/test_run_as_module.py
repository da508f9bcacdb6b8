"""Test that `python -m hypercomm.compat.megatron` runs a script as `python` does."""

import re
import textwrap
from pathlib import Path

import pytest
from forked_programs import run
from processes import launcher_free, run_python

AS_MAIN = """
import os, runpy, sys
sys.path[0] = os.getcwd()
runpy.run_module({!r}, run_name="__main__")
"""
MEGATRON, EZPZ = "hypercomm.compat.megatron", "hypercomm.compat.ezpz"
QUIET = {"TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
PRETRAINING = Path(__file__).parent / "megatron" / "pretraining"

PROGRAM = """
import os, pickle, sys

class Data: ...

def fail():
    raise KeyError("in the program")

if __name__ == "__main__":
    assert vars(sys.modules["__main__"]) is globals()
    assert type(pickle.loads(pickle.dumps(Data()))) is Data
    print(sys.argv, sys.path[0], __file__, __package__)
    import near
    print(near.__file__)
    match sys.argv[1]:
        case "fail":
            fail()
        case "hook":
            sys.excepthook = lambda kind, error, trace: print("hooked", kind, error)
            fail()
"""


def run_module(name, *arguments, folder):
    """Run a module as `python -m` does, but in a process that has torch loaded already."""
    arguments = [str(argument) for argument in arguments]
    return run(AS_MAIN.format(name), *arguments, folder=folder, environment=launcher_free())


@pytest.fixture(name="folder")
def programs(tmp_path):
    """Write programs to a folder, with a small Megatron next to them."""
    for name, text in {
        "program.py": PROGRAM,
        "near.py": "",
        "syntax.py": "x = = 1\n",
        "package/__init__.py": "",
        "package/__main__.py": PROGRAM,
        "megatron/core/__init__.py": "import megatron.core.parallel_state as mpu",
        "megatron/core/parallel_state.py": "theirs = True",
        "which.py": """
            from megatron.core import mpu, parallel_state
            print(mpu.__name__, mpu is parallel_state)
        """,
        "twice.py": """
            from hypercomm.compat.megatron import install
            install()
            from megatron.core import mpu
            print(mpu.__name__)
        """,
        "tp.py": "import ezpz.tp; print(ezpz.tp.__name__)",
        "early/sitecustomize.py": "import megatron.core",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tmp_path


# Arguments, paths, output, exit code and traceback are the same as with `python`, whether the
# program succeeds, fails, or has a syntax error.
@pytest.mark.parametrize(
    "arguments",
    [
        ["program.py", "well", "-m", "--out=1"],
        ["program.py", "fail"],
        ["program.py", "hook"],
        ["syntax.py"],
        ["-m", "package", "well", "-m", "other"],
    ],
    ids=" ".join,
)
def test_same_result_as_python(folder, arguments):
    found = run_module(MEGATRON, *arguments, folder=folder)
    expected = run_python(*arguments, folder=folder)
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]
    if arguments[0] != "-m":  # otherwise Python's traceback has frames of runpy
        assert found.stderr == expected.stderr
    assert "compat" not in found.stderr


# The program gets hypercomm's modules, even if another Megatron is next to the program.
@pytest.mark.parametrize(
    "arguments",
    [
        ["which.py"],
        ["-m", MEGATRON, "which.py"],
        ["twice.py"],
    ],
    ids=" ".join,
)
def test_program_gets_hypercomms_modules(folder, arguments, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    arguments = [folder / each if each.endswith(".py") else each for each in arguments]
    done = run_module(MEGATRON, *arguments, folder=elsewhere)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hypercomm.compat.megatron.parallel_state")


def test_program_gets_ezpz_tp(folder):
    done = run_module(EZPZ, "tp.py", folder=folder)
    assert done.stdout == "hypercomm.compat.ezpz\n", done.stderr


# If the program is not found, the error is one line.
@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        ([], 2, f"usage: python -m {MEGATRON} (SCRIPT | -m MODULE) [arguments]"),
        (["nothing.py"], 2, f"{MEGATRON}: no script 'nothing.py'"),
        (["-m", "nothing"], 1, "ImportError: No module named nothing"),
    ],
)
def test_missing_program(folder, arguments, code, problem):
    done = run_module(MEGATRON, *arguments, folder=folder)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == f"{problem}\n"


# If sitecustomize has imported Megatron before install(), the program does not start.
def test_megatron_imported_by_sitecustomize(folder):
    path = f"{folder / 'early'}:{folder}:{Path.cwd()}"
    done = run_python("-m", MEGATRON, "which.py", folder=folder, PYTHONPATH=path)
    assert done.returncode == 2
    assert "megatron.core was imported before install()" in done.stderr
    assert "sitecustomize" in done.stderr
    assert done.stdout == ""


def losses_of(*launcher):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    sizes = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    script = PRETRAINING / "pretrain_small.py"
    options = [*sizes, "--train-iters", "3"]
    done = run_python(*torchrun, *launcher, script, *options, seconds=300, **QUIET)
    assert done.returncode == 0, done.stderr
    return done.stdout, re.findall(r"step \d loss (\S+)", done.stdout)


# An unmodified program like pretrain_gpt.py has the same losses on four ranks, whether it uses
# hypercomm or not.
@pytest.mark.clients
def test_pretraining_has_the_same_losses():
    plain, expected = losses_of()
    printed, found = losses_of("-m", MEGATRON)
    assert "megatron.core.parallel_state pretrain_small.py __main__" in plain
    assert f"{MEGATRON}.parallel_state pretrain_small.py __main__" in printed
    assert found == expected
    assert len(set(found)) == 3
