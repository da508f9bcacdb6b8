"""Megatron's parallel state, process group collections and grid, rebuilt on grid instances.

The modules bear Megatron's names: `parallel_state`, `process_groups_config`, `hyper_comm_grid`.
`install()` makes `megatron.core` resolve to them, with megatron-core installed or not. `version`
is the release that they follow where releases contradict each other. `collections_of` and
`multi_module_of` return Megatron's collections of a `GridSet`.
"""

from __future__ import annotations

from hypercomm.compat.megatron import parallel_state as parallel_state
from hypercomm.compat.megatron import version as version
from hypercomm.compat.megatron.install import (
    MegatronNotReplacedWarning as MegatronNotReplacedWarning,
)
from hypercomm.compat.megatron.install import install as install
from hypercomm.compat.megatron.presets import collections_of as collections_of
from hypercomm.compat.megatron.presets import multi_module_of as multi_module_of
from hypercomm.compat.megatron.process_groups_config import (
    MultiModuleProcessGroupCollection as MultiModuleProcessGroupCollection,
)
from hypercomm.compat.megatron.process_groups_config import (
    ProcessGroupCollection as ProcessGroupCollection,
)
from hypercomm.compat.megatron.state import ParallelState as ParallelState

__all__ = [
    "MegatronNotReplacedWarning",
    "MultiModuleProcessGroupCollection",
    "ParallelState",
    "ProcessGroupCollection",
    "collections_of",
    "install",
    "multi_module_of",
    "parallel_state",
    "version",
]
