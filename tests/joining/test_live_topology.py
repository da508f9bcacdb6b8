"""Where the ranks of a job that runs are, as gloo ranks find it together."""

import ctypes
from types import SimpleNamespace

import pytest
from ranks import live_ranks

from hypercomm import live_topology, run_ranks
from hypercomm.errors import NotInitializedError
from hypercomm.joining.live import ask_nvml, domain_of, slurm_units


# All ranks find the same: hosts by name, switches as SLURM tells each of its own; what one rank
# does not know of is left out on all.
@pytest.mark.long
def test_hosts_and_switches():
    hosts, addresses = ["b", "a", "b"], ["top.s1.b", "top.s2.a", "top.s1.b"]
    levels = [
        {"name": "host", "of_rank": [0, 1, 0], "names": ["b", "a"]},
        {"name": "leaf", "of_rank": [0, 1, 0], "names": ["s1", "s2"]},
        {"name": "spine", "of_rank": [0, 0, 0], "names": ["top"]},
    ]
    arguments = (hosts, addresses, [*addresses[:2], None])
    found = run_ranks(live_ranks.topologies, 3, args=arguments)
    assert found == [[levels, levels[:1]]] * 3


def test_alone():
    with pytest.raises(NotInitializedError, match=r"call hypercomm.join\(\) first"):
        live_topology()


# SLURM's addresses, of trees and of blocks; host names may have periods.
@pytest.mark.parametrize(
    ("address", "pattern", "units"),
    [
        ("top.s2.n7", "switch.switch.node", {"leaf": "s2", "spine": "top"}),
        ("s2.n7.example.org", "switch.node", {"leaf": "s2"}),
        ("b4.n7", "block.node", {"domain": "b4"}),
        ("n7", "node", {}),
        ("n7", "switch.node", {}),
        ("", "", {}),
    ],
)
def test_slurm_units(address, pattern, units):
    held = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert slurm_units(held) == units
    assert slurm_units({}) == {}


# NVML's fabric: a cluster of zeros is none, and one that is not completed does not count.
def test_domains():
    cluster = bytes(range(16))
    assert domain_of(cluster, 32766, 3) == "000102030405060708090a0b0c0d0e0f.32766"
    assert domain_of(cluster, 32766, 2) is None
    assert domain_of(bytes(16), 32766, 3) is None


class FabricInfo(ctypes.Structure):
    """As pynvml has it, but for the version that it begins with."""

    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
    )


# NVML is asked as pynvml's functions take it, and closed again, also where it knows no fabric.
def test_nvml():
    log = []

    def fill(device, info):
        log.append(device)
        info._obj.clusterUuid[15] = 7
        info._obj.cliqueId, info._obj.state = 5, 3

    def fail(*_):
        raise RuntimeError("not supported")

    nvml = SimpleNamespace(
        nvmlInit=lambda: log.append("init"),
        nvmlShutdown=lambda: log.append("shutdown"),
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        c_nvmlGpuFabricInfoV_t=FabricInfo,
        nvmlDeviceGetGpuFabricInfoV=fill,
    )
    assert ask_nvml(nvml, "GPU-1") == f"{bytes(15).hex()}07.5"
    assert log == ["init", "handle of GPU-1", "shutdown"]
    nvml.nvmlDeviceGetGpuFabricInfoV = fail
    with pytest.raises(RuntimeError, match="not supported"):
        ask_nvml(nvml, "GPU-1")
    assert log[-1] == "shutdown"
