"""A trainer and an inference engine are two jobs in one world. The engine is killed and restarted.

    python examples/trainer_and_engine.py

Starts a trainer of 4 ranks (tp=2,dp=2) by torchrun, and an engine of 2 ranks (tp=2) as plain
processes without torch.distributed. The trainer sends ten rounds of weights. After five rounds, the
engine is killed. Then it starts again, joins the world again, and receives the weights again.
"""

import os
import signal
import socket
import subprocess
import sys

import torch
import torch.distributed as dist

from hypercomm import GridSet, World, join, join_world, transfer_state
from hypercomm.errors import StateTransferError, WorldRestartedError

PARTS = {"trainer": 4, "engine": 2}
LAYOUTS = {"trainer": "tp=2,dp=2", "engine": "tp=2"}
ROUNDS, KILLED_IN = 10, 5


def weights(number: int) -> torch.Tensor:
    """Return the full weights of a round. "tp" splits their rows in two."""
    return torch.arange(32.0).reshape(8, 4) + 100 * number


def common_round(world: World, number: int) -> int:
    """Return the smallest round of all ranks, because ranks that did not fail may be one ahead."""
    smallest = torch.tensor(number)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=world.pg)
    return int(smallest)


def train(address: str) -> None:
    """Send the weights of ten rounds."""
    with (
        join() as job,  # the job that torchrun started
        join_world(address, name="weights", parts=PARTS, part="trainer", rank=job.rank) as world,
        GridSet(LAYOUTS, world=world) as grids,
    ):
        mapping = grids.mapping("trainer", "engine", along=None, shards={"tp": 0})
        tp = grids["trainer"]["tp"].rank
        number = common_round(world, 0)
        while number < ROUNDS:
            state = {"w": weights(number).chunk(2)[tp]}
            try:
                transfer_state(mapping, state, world=world)
                number += 1
            except (WorldRestartedError, StateTransferError) as error:
                print(f"{world.title(world.rank)}: {type(error).__name__}", flush=True)
                world.rejoin()
                number = common_round(world, number)


def serve(address: str, rank: int, *, is_first: bool) -> None:
    """Receive the weights of ten rounds, or be killed after half of them."""
    with (
        join_world(
            address, name="weights", parts=PARTS, part="engine", rank=rank, serve=False
        ) as world,
        GridSet(LAYOUTS, world=world) as grids,
    ):
        mapping = grids.mapping("trainer", "engine", along=None, shards={"tp": 0})
        into = {"w": torch.zeros(4, 4)}
        for number in range(common_round(world, ROUNDS), ROUNDS):
            if is_first and number == KILLED_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            transfer_state(mapping, into=into, world=world)
            if not torch.equal(into["w"], weights(number).chunk(2)[rank]):
                raise RuntimeError(f"engine rank {rank} has wrong weights in round {number}")
            print(f"engine rank {rank} has the weights of round {number}", flush=True)


def main() -> None:
    """Start both jobs, and the engine twice."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    trainer = subprocess.Popen([*torchrun, __file__, "trainer", address])  # noqa: S603
    for life in ("first", "second"):
        command = [sys.executable, __file__, life, address]
        engine = [subprocess.Popen([*command, str(rank)]) for rank in range(PARTS["engine"])]  # noqa: S603
        codes = [process.wait(timeout=60) for process in engine]
        print(f"the {life} engine ended with {codes}", flush=True)
    if codes != [0, 0] or trainer.wait(timeout=60):
        raise SystemExit("a process has failed")
    print(f"the engine has received {ROUNDS} rounds of weights in two lives")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "trainer":
        train(sys.argv[2])
    else:
        serve(sys.argv[2], int(sys.argv[3]), is_first=sys.argv[1] == "first")
