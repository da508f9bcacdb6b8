"""Runs an unmodified Megatron program: `python -m hypercomm.compat.megatron pretrain_gpt.py`."""

from hypercomm.compat import program
from hypercomm.compat.megatron import install

if __name__ == "__main__":
    program.run(install, "hypercomm.compat.megatron")
