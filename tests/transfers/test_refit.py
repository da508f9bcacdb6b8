"""Test refits: the weights of a trainer are sent to an engine that shards them differently."""

import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from killable_ranks import run_scenario, signal_self
from time_limits import scaled_s
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hypercomm import RankLayout, RankMapping, transfer_state
from hypercomm.transfers import mover


class Model(nn.Module):
    """A model with odd sizes: rows that cannot be split evenly, or fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(53, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)
        self.few = nn.Linear(6, 1)

    def forward(self, words):
        return self.few(self.norm(self.down(self.up(self.words(words)).relu())))


# The state dict of a module after parallelize_module and fully_shard is sent as it is, before and
# after a training step. It arrives in plain tensors that are split in three, and in DTensors.
@pytest.mark.clients
@pytest.mark.parametrize("is_hybrid", [False, True])
@pytest.mark.ranks(7, timeout=120)
def test_fsdp_over_tensor_parallel(is_hybrid):
    rank = dist.get_rank()
    whole = Model().state_dict()
    names = ("copies", "shards") if is_hybrid else ("fsdp", "tp")
    trainer = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names)
    engine = DeviceMesh("cpu", [4, 5, 6])
    mapping = RankMapping.weights(RankLayout([4], ["data"]), RankLayout([3], ["tp"], 4))
    if rank > 3:
        cuts = {"up": 0, "down": 1, "words": 0}
        into = {}
        shards = {"*": {}}
        for name, tensor in whole.items():
            axis = cuts.get(name.split(".")[0])
            blank = torch.full_like(tensor, -1.0)
            if axis is None or axis == tensor.ndim:
                into[name] = distribute_tensor(blank, engine, [Replicate()], src_data_rank=None)
            elif name.startswith("words"):
                into[name] = distribute_tensor(blank, engine, [Shard(0)], src_data_rank=None)
            else:
                into[name] = blank.chunk(3, axis)[rank - 4].clone()
                shards = {name: {"tp": axis}, **shards}
        for _ in range(2):
            transfer_state(mapping, into=into, shards=shards)
        for name, tensor in whole.items():
            found = into[name]
            if isinstance(found, DTensor):
                found = found.full_tensor()
                assert torch.equal(found, tensor), name
            else:
                axis = cuts[name.split(".")[0]]
                assert torch.equal(found, tensor.chunk(3, axis)[rank - 4]), name
        return
    model = Model()
    if not is_hybrid:
        parallelize_module(
            model, trainer["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        fully_shard(model.up, mesh=trainer["fsdp"])
    fully_shard(model, mesh=trainer if is_hybrid else trainer["fsdp"])
    transfer_state(mapping, model.state_dict())
    model(torch.arange(5)).sum().backward()
    transfer_state(mapping, model.state_dict())


def refit_with_a_victim(rank, how, number):
    """Refit twice from two ranks to two. Rank 1 dies or stops in a bucket of the second refit."""
    mapping = RankMapping.weights(RankLayout([2], ["tp"]), RankLayout([2], ["dp"], 2))
    names = [f"{layer}.w" for layer in range(6)]
    state = {name: torch.ones(300) for name in names} if rank < 2 else None
    into = {name: torch.zeros(600) for name in names} if rank > 1 else None
    given = {"shards": {"*": {"tp": 0}}, "bucket_bytes": 4096}
    buckets = transfer_state(mapping, state, into=into, **given)
    for one in (into or {}).values():
        one.zero_()
    posted = []
    post = mover.post

    def dying(*args):
        posted.append(1)
        if rank == 1 and len(posted) == number % buckets + 1:
            signal_self(how)
        return post(*args)

    begin = time.monotonic()
    with mock.patch.object(mover, "post", dying):
        try:
            transfer_state(mapping, state, into=into, **given)
        except Exception as error:  # noqa: BLE001 - the test checks it
            complete = [name for name, one in (into or {}).items() if (one == 1).all()]
            facts = type(error).__name__, str(error), complete, buckets
            return [*facts, time.monotonic() - begin]
    return ["", "", [], buckets, 0]


# If a rank dies or stops in any bucket, the ranks that communicate with it raise within the
# timeout. The error names the lost message and the parameters that may be partly written. All other
# parameters are complete.
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("number", range(6))
def test_lost_rank_is_reported(how, number, tmp_path):
    timeout_s = scaled_s(5)
    found = run_scenario(
        tmp_path, refit_with_a_victim, 4, int(how), number, victims=[1], timeout_s=timeout_s
    )
    for rank, (kind, text, complete, buckets, seconds) in found.items():
        if rank == 0 and not kind:
            continue  # the rank had sent everything
        assert kind == "StateTransferError", text
        assert f"rank {rank} lost bucket " in text
        assert " bytes of " in text
        assert seconds < timeout_s + scaled_s(2)
        assert buckets > 3
        for name in {f"{layer}.w" for layer in range(6)} - {*complete} if rank > 1 else ():
            assert repr(name) in text.partition("perhaps partly written: ")[2]
    assert {found[2][0], found[3][0]} == {"StateTransferError"}
