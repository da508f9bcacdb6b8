"""Jobs that torchrun restarts, with as many ranks or fewer: the grid fits what is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import rank_free
from ports import free_port

pytestmark = [pytest.mark.clients, pytest.mark.alone]

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
from hypercomm import HyperCommGrid, RankLayout
from group_facts import sum_over

folder, victim = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
layout = RankLayout.fit(dist.get_world_size(), tp=[1, 2], dp=-1)
with HyperCommGrid(layout, cover="exact") as grid:
    tp, dp = grid.create_pgs(["tp", "dp"])
    is_enough = torch.zeros(1)
    while not is_enough:
        seen = {"layout": str(layout), "sums": [sum_over(tp), sum_over(dp)], "pid": os.getpid()}
        draft = folder / f"{attempt}-{rank}.draft"
        draft.write_text(json.dumps({**seen, "agent": os.getppid()}))
        draft.rename(draft.with_suffix(".json"))
        if attempt == 0 and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        is_enough = torch.tensor([float((folder / "enough").exists())])
        dist.broadcast(is_enough, src=0)
dist.destroy_process_group()
"""
"""A program for torchrun: its grid fits the world that it finds. It adds up over tp and dp until
the folder holds "enough", as rank 0 sees it."""

NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it an agent serves all attempts from one store, where gloo's WORLD finds the addresses
of ranks that are gone (torch 2.13): "Connection refused" in init_process_group."""


class Agents:
    """What torchrun starts, with the folder where the ranks write what they saw."""

    def __init__(self, folder):
        self.folder = folder
        self.processes = []
        (folder / "program.py").write_text(PROGRAM)

    def start(self, *options, victim=-1):
        variables = rank_free() | NEW_STORE
        variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.2"]
        with (self.folder / f"{len(self.processes)}.log").open("w") as log:
            agent = subprocess.Popen(
                [*torchrun, *options, self.folder / "program.py", self.folder, str(victim)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
            )
        self.processes.append(agent)
        return agent

    def log(self):
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"---- {log.name}\n{log.read_text()}" for log in logs)

    def seen(self, attempt):
        """What the ranks of an attempt have written so far, by rank."""
        files = self.folder.glob(f"{attempt}-*.json")
        return {int(file.stem.split("-")[1]): json.loads(file.read_text()) for file in files}

    def wait_for_end(self, agent, seconds):
        try:
            agent.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"torchrun has not ended after {seconds} s\n{self.log()}")
        assert agent.returncode == 0, self.log()

    def kill(self, agent):
        """End an agent and its ranks, as if the machine were gone."""
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(agent.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        agent.kill()
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait(10)


@pytest.fixture
def agents(tmp_path):
    made = Agents(tmp_path)
    try:
        yield made
    finally:
        for agent in made.processes:
            if agent.poll() is None:
                made.kill(agent)


def sums(rank, tp, dp):
    """What `10**rank` of the members adds up to over tp and over dp; ranks count along tp first."""
    first = rank - rank % tp
    over_tp = sum(10 ** (first + step) for step in range(tp))
    over_dp = sum(10 ** (rank % tp + tp * step) for step in range(dp))
    return [over_tp, over_dp]


def assert_fits(seen, tp, dp):
    assert sorted(seen) == list(range(tp * dp))
    for rank, each in seen.items():
        assert (each["layout"], each["sums"]) == (f"tp={tp},dp={dp}", sums(rank, tp, dp))


# When one of two agents dies with its ranks, the other restarts its own, whose grid fits them.
def test_an_agent_that_dies(agents):
    rendezvous = ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3"]
    rendezvous += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    rendezvous += ["--local-addr", "127.0.0.1", "--rdzv-conf"]
    times = "join_timeout=60,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    dying = agents.start(*rendezvous, f"is_host=0,{times}")
    staying = agents.start(*rendezvous, f"is_host=1,{times}")
    deadline = time.monotonic() + 30
    while len(agents.seen(0)) < 4:
        assert time.monotonic() < deadline, agents.log()
        time.sleep(0.05)
    before = agents.seen(0)
    assert_fits(before, 2, 2)
    assert sorted(each["agent"] for each in before.values()) == sorted(
        [dying.pid, dying.pid, staying.pid, staying.pid]
    )
    agents.kill(dying)
    (agents.folder / "enough").touch()
    agents.wait_for_end(staying, 120)
    after = agents.seen(1)
    assert_fits(after, 2, 1)
    assert {each["agent"] for each in after.values()} == {staying.pid}


# When a rank dies after its grid was created, the restarted job of as many ranks works again.
def test_a_rank_that_dies(agents):
    (agents.folder / "enough").touch()
    options = ["--standalone", "--nproc-per-node", "4", "--max-restarts", "1"]
    agents.wait_for_end(agents.start(*options, victim=3), 120)
    first, second = agents.seen(0), agents.seen(1)
    assert (first[3]["layout"], first[3]["sums"]) == ("tp=2,dp=2", sums(3, 2, 2))
    assert_fits(second, 2, 2)
    assert {each["pid"] for each in first.values()}.isdisjoint(
        each["pid"] for each in second.values()
    )
