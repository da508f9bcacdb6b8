"""Where the ranks of the job that runs are: hosts, NVLink domains, switches as SLURM tells them.

Sources: NVML's nvmlGpuFabricInfo, https://docs.nvidia.com/deploy/nvml-api: GPUs with one
clusterUuid and cliqueId share an NVLink domain; srun(1), SLURM_TOPOLOGY_ADDR: switches from the top
level down to the leaf, and the node, with a period between them, and SLURM_TOPOLOGY_ADDR_PATTERN
says what each is.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hypercomm.errors import NotInitializedError
from hypercomm.topology import Level, Topology
from hypercomm.topology.found import tier
from hypercomm.topology.reading import place_of

_COMPLETED = 3
"""NVML_GPU_FABRIC_STATE_COMPLETED."""


def live_topology() -> Topology:
    """Return where the ranks of the job that runs are; every rank of WORLD must call this.

    Ranks are on one host where their host names are the same, and in one NVLink domain where NVML
    (package nvidia-ml-py) tells one cluster and clique. Switches are those of SLURM. A level that
    not all ranks know of is left out.

    Returns:
        The levels of all ranks, on each the same.

    Raises:
        NotInitializedError: torch.distributed is not initialised.

    Example:
        >>> from hypercomm import join, run_ranks
        >>> with join(environment={}):
        ...     live_topology().names[0]
        'host'
    """
    if not dist.is_available() or not dist.is_initialized():
        raise NotInitializedError(
            "live_topology() asks all ranks of torch.distributed, which is not initialised: call "
            "hypercomm.join() first"
        )
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, _here())
    names = [name for name in every[0] if all(name in units for units in every)]
    return Topology(
        Level.of(name, [units[name] for units in every]) for name in sorted(names, key=place_of)
    )


def _here() -> dict[str, str]:
    """The units that this rank is in, by level."""
    units = {"host": socket.gethostname(), **slurm_units(os.environ)}
    domain = _nvlink_domain()
    return units if domain is None else units | {"domain": domain}


def slurm_units(held: Mapping[str, str]) -> dict[str, str]:
    """Return the switches, or the block, of a node as SLURM tells them.

    Args:
        held: The environment.

    Example:
        >>> address = {"SLURM_TOPOLOGY_ADDR": "top.s2.node07"}
        >>> slurm_units(address | {"SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"})
        {'leaf': 's2', 'spine': 'top'}
    """
    pattern = held.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    parts = held.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(pattern) - 1)
    if len(parts) != len(pattern):
        return {}
    units = {}
    switches = [part for kind, part in zip(pattern, parts, strict=True) if kind == "switch"]
    for number, switch in enumerate(reversed(switches)):
        units[tier(number)] = switch
    blocks = [part for kind, part in zip(pattern, parts, strict=True) if kind == "block"]
    return units | ({"domain": blocks[-1]} if blocks else {})


def _nvlink_domain() -> str | None:
    """The NVLink domain of this rank's GPU; None where nothing tells."""
    if not torch.cuda.is_available():
        return None
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    try:
        return ask_nvml(importlib.import_module("pynvml"), f"GPU-{uuid}")
    except Exception:  # noqa: BLE001 - whatever NVML lacks here, hosts are known without it
        return None


def ask_nvml(nvml: Any, uuid: str) -> str | None:
    """Ask NVML for the NVLink domain of a GPU.

    Args:
        nvml: The module pynvml.
        uuid: The GPU's, as in "GPU-...".
    """
    nvml.nvmlInit()
    try:
        device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        info = nvml.c_nvmlGpuFabricInfoV_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info))
    finally:
        nvml.nvmlShutdown()
    return domain_of(bytes(info.clusterUuid), info.cliqueId, info.state)


def domain_of(cluster: bytes, clique: int, state: int) -> str | None:
    """Return the name of an NVLink domain; None where a GPU is in none beyond its host.

    Args:
        cluster: NVML's clusterUuid.
        clique: Its cliqueId.
        state: Of the fabric.

    Example:
        >>> domain_of(bytes(15) + b"A", 7, 3), domain_of(bytes(16), 0, 3), domain_of(b"A", 7, 1)
        ('00000000000000000000000000000041.7', None, None)
    """
    if state != _COMPLETED or not any(cluster):
        return None
    return f"{cluster.hex()}.{clique}"
