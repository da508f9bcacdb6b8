"""Test the topology that the ranks of a running job gather."""

import ctypes
import os
import socket
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from processes import run_python

from hypercomm import live_topology
from hypercomm.tools.place import Level, Topology
from hypercomm.tools.place.live import nvml_domain, slurm_units, visible_gpu


# All ranks find the same levels: hosts by name, and the switches that SLURM reports for each rank.
# A level that is unknown on one rank is left out on all.
@pytest.mark.full
@pytest.mark.ranks(3)
def test_hosts_and_switches():
    rank = dist.get_rank()
    host = Level("host", [0, 1, 0], ["b", "a"])
    socket.gethostname = lambda: ["b", "a", "b"][rank]
    os.environ["SLURM_TOPOLOGY_ADDR_PATTERN"] = "switch.switch.node"
    os.environ["SLURM_TOPOLOGY_ADDR"] = ["top.s1.b", "top.s2.a", "top.s1.b"][rank]
    leaf, spine = Level("leaf", [0, 1, 0], ["s1", "s2"]), Level("spine", [0, 0, 0], ["top"])
    assert live_topology() == Topology([host, leaf, spine])
    if rank == 2:
        del os.environ["SLURM_TOPOLOGY_ADDR"]
    assert live_topology() == Topology([host])


# Addresses in SLURM's trees and blocks are parsed. Host names may contain periods.
@pytest.mark.parametrize(
    ("address", "pattern", "units"),
    [
        ("top.s2.n7", "switch.switch.node", {"leaf": "s2", "spine": "top"}),
        ("b4.n7", "block.node", {"domain": "b4"}),
        ("n7", "switch.node", {}),
    ],
)
def test_slurm_units(address, pattern, units):
    held = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert slurm_units(held) == units
    assert slurm_units({}) == {}


# CUDA numbers the visible GPUs of a process from 0. CUDA_VISIBLE_DEVICES maps these numbers to the
# GPUs of the host.
@pytest.mark.parametrize(
    ("visible", "device", "gpu"),
    [(None, 3, 3), ("5", 0, 5), ("4, 6", 1, 6), ("4", 1, None), ("GPU-8a", 0, None), ("", 0, None)],
)
def test_visible_gpu(visible, device, gpu):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpu(environment, device) == gpu


class FabricInfo(ctypes.Structure):
    """The struct of pynvml, without its leading version field."""

    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
    )


# NVML is called as pynvml expects, and always shut down. A cluster id of zeros is not an NVLink
# domain, and neither is a fabric whose state is not "completed".
@pytest.mark.parametrize(
    ("fabric", "domain"),
    [((7, 5, 3), f"{bytes(15).hex()}07.5"), ((7, 5, 2), None), ((0, 5, 3), None), ((), None)],
)
def test_nvml_domain(fabric, domain):
    log = []

    def fill(device, info):
        log.append(device)
        info = ctypes.cast(info, ctypes.POINTER(FabricInfo)).contents
        info.clusterUuid[15], info.cliqueId, info.state = fabric

    nvml = SimpleNamespace(
        nvmlInit=lambda: log.append("init"),
        nvmlShutdown=lambda: log.append("shutdown"),
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        c_nvmlGpuFabricInfoV_t=FabricInfo,
        nvmlDeviceGetGpuFabricInfoV=fill,
    )
    if fabric:
        assert nvml_domain(nvml, "GPU-1") == domain
    else:
        with pytest.raises(ValueError, match="unpack"):
            nvml_domain(nvml, "GPU-1")
    assert log == ["init", "handle of GPU-1", "shutdown"]


# With --on live, one rank prints the report for the job.
@pytest.mark.clients
def test_place_on_live():
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--no-python"]
    done = run_python(*torchrun, "hypercomm", "place", "tp=2,dp=2", "--on", "live")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tp=2,dp=2: 4 ranks on 1 host") == 1
