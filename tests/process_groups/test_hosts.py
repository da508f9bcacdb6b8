"""Test a job of several hosts, which are network namespaces on one switch. Each runs torchrun."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import launcher_free
from time_limits import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # hosts are slow enough already

SWITCH = f"hc{os.getpid()}-net"
NAMED = 'hostname "$0" && exec "$@"'


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """Namespaces for hosts 10.0.0.1, 10.0.0.2, ..., and for the switch that connects the hosts."""

    def __init__(self, folder):
        self.folder = folder
        self.names = []
        self.agents = []

    def build(self, count):
        ip("netns", "add", SWITCH)
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        for number in range(count):
            name = f"hc{os.getpid()}-{number}"
            port = f"port{number}"
            ip("netns", "add", name)
            self.names.append(name)
            end = ("type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", SWITCH, "link", "add", port, *end)
            ip("-n", SWITCH, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "link", "set", "eth0", "addrgenmode", "none")
            ip("-n", name, "addr", "add", f"10.0.0.{number + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")

    def start(self, *program):
        """Start torchrun with two ranks on each host. Ranks ascend with the hosts."""
        variables = launcher_free() | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        variables["PYTHONPATH"] = os.pathsep.join(map(str, Path(__file__).parents[1:3]))
        for number, name in enumerate(self.names):
            enter = ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", NAMED, name)
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
            torchrun += ["--nnodes", str(len(self.names)), "--local-addr", f"10.0.0.{number + 1}"]
            torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.0.0.1:29500"]
            torchrun += ["--rdzv-conf", f"is_host={int(number == 0)},join_timeout=60"]
            with (self.folder / f"{name}.log").open("w") as log:
                self.agents.append(
                    subprocess.Popen(
                        [*enter, *torchrun, *program],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=variables,
                        start_new_session=True,
                    )
                )

    def processes(self):
        return [int(pid) for name in self.names for pid in ip("netns", "pids", name).split()]

    def logs(self):
        return "\n".join(
            f"---- {name}\n{(self.folder / f'{name}.log').read_text()}" for name in self.names
        )

    def wait_for_end(self, seconds):
        """Wait until every torchrun has ended without an error and left no process."""
        wait_until(
            lambda: all(agent.poll() is not None for agent in self.agents), seconds, self.logs
        )
        assert [agent.returncode for agent in self.agents] == [0] * len(self.agents), self.logs()
        wait_until(lambda: not self.processes(), 5, lambda: f"left: {self.processes()}")

    def remove(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.wait(10)
        for name in [*self.names, SWITCH]:
            with contextlib.suppress(OSError):
                ip("netns", "del", name)


@pytest.fixture(scope="session")
def _permitted(tmp_path_factory):
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"hosts are network namespaces, and this machine has no {tool!r}")
    trial = Hosts(tmp_path_factory.mktemp("trial"))
    try:
        trial.build(1)
        enter = ("netns", "exec", trial.names[0], "unshare", "--uts", "sh", "-c", NAMED)
        assert ip(*enter, "trial", "hostname") == "trial\n"
    except OSError as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")
    finally:
        trial.remove()


@pytest.fixture
def hosts(_permitted, tmp_path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    try:
        yield made
    finally:
        made.remove()


# `hypercomm check` joins a job of several hosts, and its sums are right over all groups.
def test_check_across_hosts(hosts):
    hosts.build(2)
    hosts.start("-m", "hypercomm", "check", "tp=2,dp=2")
    hosts.wait_for_end(60)
    summary = "right over every group, on 4 gloo ranks"
    log = (hosts.folder / f"{hosts.names[0]}.log").read_text()
    assert re.search(f"^tp=2,dp=2: all-reduce is {summary}, in ", log, re.MULTILINE), log
    rows = [line.split() for line in log.splitlines() if line.endswith(" ok")]
    groups = [(row[0], " ".join(row[1:4])) for row in rows]
    assert groups == [("tp", "2 x 2"), ("dp", "2 x 2"), ("tp+dp", "1 x 4")]
