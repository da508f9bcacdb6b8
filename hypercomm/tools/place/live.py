"""The machine of the running job: host names, NVLink domains and SLURM's switches.

Sources:

- nvmlGpuFabricInfo, https://docs.nvidia.com/deploy/nvml-api. GPUs with the same clusterUuid and
  cliqueId share an NVLink domain.
- srun(1). SLURM_TOPOLOGY_ADDR lists the switches from the top to the leaf and then the node,
  separated by periods. SLURM_TOPOLOGY_ADDR_PATTERN lists the kind of each entry.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from hypercomm.errors import LaunchError, LayoutError
from hypercomm.tools.place.reading import place_of, tier
from hypercomm.tools.place.topology import Level, Topology

_FABRIC_COMPLETED = 3
"""NVML_GPU_FABRIC_STATE_COMPLETED."""


def live_topology() -> Topology:
    """Return the host, NVLink domain and switches of each rank of the running job.

    Every rank of WORLD must call this. Ranks with the same host name are on one host.
    CUDA_VISIBLE_DEVICES determines which GPU of the host a rank uses. Ranks with the same NVML
    cluster and clique are in one NVLink domain. Domains are unknown without nvidia-ml-py. The
    switches are read from SLURM's variables. A level that is unknown on some ranks is left out.

    Returns:
        The levels of all ranks, equal on every rank.

    Raises:
        NotInitializedError: torch.distributed is not initialised.

    Example:
        >>> from hypercomm import join, live_topology
        >>> with join(environment={}):
        ...     live_topology().names[0]
        'host'
    """
    import torch.distributed as dist

    from hypercomm.process_groups.world import current

    gathered: list[Any] = [None] * current().size
    own = {"host": socket.gethostname(), **slurm_units(os.environ)}
    domain = _nvlink_domain()
    if domain:
        own["domain"] = domain
    dist.all_gather_object(gathered, (own, _own_gpu()))
    every, gpus = zip(*gathered, strict=True)
    names = [name for name in every[0] if all(name in units for units in every)]
    return Topology(
        [Level.of(name, [units[name] for units in every]) for name in sorted(names, key=place_of)],
        gpus=None if None in gpus else gpus,
    )


def slurm_units(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the switches and the block of this node, by level, from SLURM's variables.

    Example:
        >>> address = {"SLURM_TOPOLOGY_ADDR": "top.s2.node07"}
        >>> slurm_units(address | {"SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"})
        {'leaf': 's2', 'spine': 'top'}
    """
    pattern = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    # The last part is the name of the node, which may contain periods.
    parts = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(pattern) - 1)
    if len(parts) != len(pattern):
        return {}
    pairs = list(zip(pattern, parts, strict=True))
    switches = [part for kind, part in pairs if kind == "switch"]
    units = {tier(number): switch for number, switch in enumerate(reversed(switches))}
    blocks = [part for kind, part in pairs if kind == "block"]
    return units | ({"domain": blocks[-1]} if blocks else {})


def _own_gpu() -> int | None:
    """Return the index of this rank's GPU on its host, or None if it is unknown."""
    import torch

    if not torch.cuda.is_available():
        return None
    return visible_gpu(os.environ, torch.cuda.current_device())


def visible_gpu(environment: Mapping[str, str], device: int) -> int | None:
    """Return the index of a GPU on its host, or None if the environment does not show it.

    Args:
        environment: The environment. CUDA_VISIBLE_DEVICES, if set, lists the GPUs that the process
            can use.
        device: The index of the GPU in this process.

    Example:
        >>> visible_gpu({"CUDA_VISIBLE_DEVICES": "5,6"}, 1), visible_gpu({}, 1)
        (6, 1)
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return device
    entries = [entry.strip() for entry in listed.split(",")]
    is_number = device < len(entries) and entries[device].isdecimal()
    return int(entries[device]) if is_number else None


def _nvlink_domain() -> str | None:
    """Return the NVLink domain of this rank's GPU, or None if NVML reports no domain."""
    import torch

    if not torch.cuda.is_available():
        return None
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    try:
        return nvml_domain(importlib.import_module("pynvml"), f"GPU-{uuid}")
    except Exception:  # noqa: BLE001 - NVLink domains are optional
        return None


def nvml_domain(nvml: Any, uuid: str) -> str | None:
    """Return the NVLink domain of a GPU, or None if NVML reports no domain.

    Args:
        nvml: The module pynvml.
        uuid: The UUID of the GPU, such as "GPU-...".
    """
    nvml.nvmlInit()
    try:
        device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        info = nvml.c_nvmlGpuFabricInfoV_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info))
    finally:
        nvml.nvmlShutdown()
    cluster = bytes(info.clusterUuid)
    if info.state != _FABRIC_COMPLETED or not any(cluster):
        return None
    return f"{cluster.hex()}.{info.cliqueId}"


def machine(on: Sequence[str]) -> Topology | Sequence[str] | None:
    """Return the machine that the values of `--on` describe.

    Args:
        on: The values, in the order given.

    Returns:
        The values themselves, which `read_topology` reads. If the value is "live", rank 0 returns
        the topology of the job, and the other ranks return None and print nothing.

    Raises:
        LayoutError: "live" is combined with other values.
        LaunchError: This process is not a rank of a job, or its environment is inconsistent.
    """
    if "live" not in on:
        return on
    if len(on) > 1:
        raise LayoutError("--on live cannot be combined with other --on values")
    from hypercomm.cli.printing import quiet
    from hypercomm.job_environment import find_job
    from hypercomm.launch import join

    if find_job(os.environ) is None:
        raise LaunchError(
            "--on live needs a job, and no launcher was found: use srun, mpirun or torchrun "
            "--no-python"
        )
    with quiet(), join(backend="gloo") as job:
        found = live_topology()
    return None if job.rank else found
