"""Megatron's parallel state, process group collections and grid, rebuilt on grid instances.

The modules bear Megatron's names: `parallel_state`, `process_groups_config`, `hyper_comm_grid`.
`install()` makes `megatron.core` resolve to them, with megatron-core installed or not.
"""

from __future__ import annotations

from hypercomm.compat.megatron import parallel_state as parallel_state  # its getters come first
from hypercomm.compat.megatron.install import install as install
from hypercomm.compat.megatron.install import uninstall as uninstall
from hypercomm.compat.megatron.state import ParallelState as ParallelState

__all__ = ["ParallelState", "install", "parallel_state", "uninstall"]
