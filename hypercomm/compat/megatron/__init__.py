"""Megatron's parallel state, process group collections and grid, rebuilt on grid instances.

The modules have Megatron's names: `parallel_state`, `process_groups_config`, `hyper_comm_grid`.
`install()` makes `megatron.core` resolve to these modules, even if megatron-core is not installed.
Where Megatron's releases differ, the modules follow the release that `version` selects.
`collections_of` returns a `ProcessGroupCollection` for each grid of a `GridSet`.
"""

from __future__ import annotations

from hypercomm.compat.megatron import parallel_state, version
from hypercomm.compat.megatron.install import MegatronNotReplacedWarning, install
from hypercomm.compat.megatron.presets import collections_of
from hypercomm.compat.megatron.process_groups_config import ProcessGroupCollection
from hypercomm.compat.megatron.state import ParallelState

__all__ = [
    "MegatronNotReplacedWarning",
    "ParallelState",
    "ProcessGroupCollection",
    "collections_of",
    "install",
    "parallel_state",
    "version",
]
