"""`python -m hypercomm.compat.ezpz train.py`: runs a program written for ezpz, without edits."""

from hypercomm.compat import program
from hypercomm.compat.ezpz import install

if __name__ == "__main__":
    program.run(install, "hypercomm.compat.ezpz")
