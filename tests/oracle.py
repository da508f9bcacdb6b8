"""megatron-core, the oracle, as it is but for what it compiles, which loads inductor: two seconds.

Tests import it from here, each worker once.
"""

from unittest import mock

import torch


def as_it_is(function=None, **_):
    """What stands in for torch.compile: it is given a function, or gives a decorator."""
    return (lambda given: given) if function is None else function


with mock.patch.object(torch, "compile", as_it_is):
    from megatron import core
    from megatron.core import hyper_comm_grid, parallel_state, process_groups_config, utils
    from megatron.core.pipeline_parallel import bridge_communicator

__all__ = [
    "bridge_communicator",
    "core",
    "hyper_comm_grid",
    "parallel_state",
    "process_groups_config",
    "utils",
]
