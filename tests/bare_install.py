"""What works where only the wheel is installed, and what is said where an extra is missing.

A program and no test: `.ci/run package` runs it in an environment that has no pytest either.
"""

import importlib.util
import subprocess
import sys

import hypercomm
from hypercomm import RankLayout


def said_by(program):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def check(is_right, told):
    if not is_right:
        sys.exit(f"bare install: {told}")


for extra in ("pytest", "hypothesis", "click", "rich", "matplotlib", "yaml"):
    check(importlib.util.find_spec(extra) is None, f"{extra} is installed; this shows nothing")
check(importlib.util.find_spec("hypercomm").origin.count("site-packages"), "not from the wheel")
check(list(RankLayout("tp=2,dp=4").groups("dp")) == [(0, 2, 4, 6), (1, 3, 5, 7)], "groups")
check("torch" not in sys.modules, "a layout has loaded torch")

done = subprocess.run(
    [sys.executable, "-m", "hypercomm", "plan", "tp=2"], capture_output=True, text=True, check=False
)
check(
    (done.returncode, "pip install 'hypercomm[cli]'" in done.stderr) == (2, True),
    f"hypercomm: {done.returncode} {done.stderr}",
)
code, told = said_by("from hypercomm.testing import layouts")
check(code == 1 and "pip install 'hypercomm[testing]'" in told, f"strategies: {code} {told}")
program = """
from hypercomm.testing import fake_world
from hypercomm import HyperCommGrid
with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
    print(grid.create_pg("dp").size())
"""
check(said_by(program) == (0, "4\n"), "a grid in a fake world")
print(f"bare install: hypercomm {hypercomm.__version__} works, and says which extras are missing")
