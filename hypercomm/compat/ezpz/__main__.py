"""Runs an unmodified program for ezpz: `python -m hypercomm.compat.ezpz train.py`."""

from hypercomm.compat import program
from hypercomm.compat.ezpz import install

if __name__ == "__main__":
    program.run(install, "hypercomm.compat.ezpz")
