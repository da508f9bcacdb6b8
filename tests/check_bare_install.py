"""Check the wheel in an environment without extras: layouts work, errors name the missing extra.

This file is a program and not a pytest file, because `.ci/run package` runs it without pytest.
"""

import importlib.util
import subprocess
import sys

import hypercomm
from hypercomm import RankLayout


def run_program(program):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def check(is_right, message):
    if not is_right:
        sys.exit(f"bare install: {message}")


for extra in ("pytest", "hypothesis", "click", "rich", "matplotlib", "yaml"):
    check(importlib.util.find_spec(extra) is None, f"{extra} is installed: nothing is checked")
check(importlib.util.find_spec("hypercomm").origin.count("site-packages"), "not from the wheel")
check(list(RankLayout("tp=2,dp=4").groups("dp")) == [(0, 2, 4, 6), (1, 3, 5, 7)], "groups")
check("torch" not in sys.modules, "a layout has loaded torch")

done = subprocess.run(
    [sys.executable, "-m", "hypercomm", "plan", "tp=2"], capture_output=True, text=True, check=False
)
check(done.returncode == 2, f"hypercomm: {done.returncode} {done.stderr}")
check("pip install click rich" in done.stderr, f"hypercomm: {done.stderr}")
code, output = run_program("from hypercomm.testing import layouts")
check(code == 1, f"strategies: {code} {output}")
check("pip install 'hypercomm[testing]'" in output, f"strategies: {output}")
program = """
from hypercomm.testing import fake_world
from hypercomm import HyperCommGrid
with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
    print(grid.create_pg("dp").size())
"""
check(run_program(program) == (0, "4\n"), "a grid in a fake world")
print(f"bare install: hypercomm {hypercomm.__version__} works, and errors name missing extras")
