"""Imports megatron-core without torch.compile, which would load inductor and take 2 s.

Tests import megatron-core from this module, so that each worker imports it once.
"""

from unittest import mock

import torch


def do_not_compile(function=None, **_):
    """Replace torch.compile, which takes a function or returns a decorator."""
    return (lambda given: given) if function is None else function


with mock.patch.object(torch, "compile", do_not_compile):
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
