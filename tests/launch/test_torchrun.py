"""Test join() under torchrun. (test_job_environment.py tests the variables of other launchers.)"""

import json

import pytest
from processes import run_python

pytestmark = pytest.mark.clients

PROGRAM = """
import json, os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import hypercomm

with hypercomm.join(timeout=timedelta(seconds=60)) as job:
    tensors = {dim: torch.tensor([job.rank]) for dim in ("tp", "dp")}
    with hypercomm.HyperCommGrid("tp=2,dp=2") as grid:
        for dim, tensor in tensors.items():
            dist.all_reduce(tensor, group=grid.create_pg(dim))
    dist.barrier()  # a rank that leaves early would break connections of slow ranks
    if "--die" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(3) if job.rank == 1 else time.sleep(60)
place = [job.launcher, job.rank, job.size, job.local_rank, job.local_size]
found = {"place": place, "at": [job.address, job.port], "sums": [*map(int, tensors.values())]}
sys.stdout.write(json.dumps(found) + "\\n")  # one write, because all ranks write to this file
"""


# Ranks join through the store of torchrun's agent and sum over their groups, even after a rank has
# died and torchrun has restarted all ranks.
@pytest.mark.parametrize("options", [(), ("--die",)])
def test_join_under_torchrun(options, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
    torchrun += ["--max-restarts", "1", "--monitor-interval", "0.2"]
    variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = run_python(*torchrun, tmp_path / "program.py", *options, **variables)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = sorted(lines, key=lambda rank: rank["place"][1])
    places = [rank["place"] for rank in found]
    assert places == [["torchrun", rank, 4, rank, 4] for rank in range(4)]
    # tp=2,dp=2: groups 0 1, 2 3 and 0 2, 1 3
    assert [rank["sums"] for rank in found] == [[1, 2], [1, 4], [5, 2], [5, 4]]
    assert len({tuple(rank["at"]) for rank in found}) == 1
