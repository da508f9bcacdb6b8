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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hypercomm import Fused, RankLayout, RankMapping, transfer_state
from hypercomm.errors import CreationError, LayoutError, PlanMismatchError
from hypercomm.transfers import mover, state as module
from hypercomm.transfers.exchange import Exchange


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


MESH = [0, 1]
ROWS = torch.arange(30.0).reshape(10, 3)


def distributed(placement, ranks=MESH, whole=ROWS):
    mesh = DeviceMesh("cpu", ranks, _init_backend=False)
    if dist.get_rank() not in ranks:
        return torch.zeros(5, 3)
    local = whole
    if isinstance(placement, Shard):
        local = whole.chunk(len(ranks), placement.dim)[ranks.index(dist.get_rank())]
    given = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
    return DTensor.from_local(local.clone(), mesh, [placement], **given)


# If anything does not fit, all ranks raise within about a second, before anything is sent. The
# error names the tensor, a rank and both sizes. Buffers do not change, and the next call works.
@pytest.mark.full
@pytest.mark.ranks(4, timeout=120)
def test_tensors_that_do_not_fit():
    rank = dist.get_rank()
    mapping = RankMapping.weights(RankLayout([2], ["fsdp"]), RankLayout([2], ["tp"], 2))
    qkv = {"q": torch.ones(8, 3), "k": torch.ones(2, 3), "v": torch.ones(2, 3)}

    def move(make_state, make_into, **more):
        into = {name: one.fill_(-1.0) for name, one in (make_into() if rank > 1 else {}).items()}
        shards = {"*": {}}
        if "w" in into:
            shards = {"w": {"tp": 0}, **shards}
        if "qkv" in into:
            shards = {"qkv": {"tp": 0}, **shards}
        if rank > 1:
            transfer_state(mapping, into=into, shards=shards, **more)
            return into
        more.pop("fused", None)
        transfer_state(mapping, make_state(), **more)
        return None

    def good():
        return {"w": distributed(Shard(0))}

    def buffer():
        return {"w": torch.zeros(5, 3)}

    fused = {"qkv": Fused(["q", "k", "v"], (4, 1, 1))}
    for message, at_fault, make_state, make_into, more in (
        ("state['w']: has placement P", (0, 1), lambda: {"w": distributed(Partial())}, buffer, {}),
        (
            "state['w']: is a DTensor on a mesh of ranks 0, 1, 2, but the mapping requires",
            (0, 1),
            lambda: {"w": distributed(Shard(0), [0, 1, 2])},
            buffer,
            {},
        ),
        ("2 needs 'w' for into['w']", (), lambda: {"x": ROWS}, buffer, {}),
        ("0 has 'x' in state", (), lambda: {**good(), "x": ROWS}, buffer, {}),
        (
            "of 'w' is (10, 3) in state= and (8, 3) in into=: rank 0 sends a part of shape (5, 3)",
            (),
            good,
            lambda: {"w": torch.zeros(4, 3)},
            {},
        ),
        (
            "and (12, 3) in into=: ",
            (),
            good,
            lambda: {"w": torch.zeros(6, 3)},
            {},
        ),
        (
            "into['w'] has shape (5, 3) on rank 2 and (5, 4) on rank 3",
            (),
            good,
            lambda: {"w": torch.zeros(5, rank + 1)},
            {},
        ),
        (
            "arrives as float32, and into['w'] has float16; pass dtype=",
            (),
            good,
            lambda: {"w": torch.zeros(5, 3).half()},
            {},
        ),
        (
            "arrives as bfloat16, and into['w'] has float32",
            (),
            good,
            buffer,
            {"dtype": torch.bfloat16},
        ),
        (
            "2 needs 'v' for into['qkv'], but state= contains 'k', 'q'",
            (),
            lambda: {"q": ROWS, "k": ROWS},
            lambda: {"qkv": torch.zeros(6, 3)},
            {"fused": fused},
        ),
        (
            "shards of its parts ['q', 'k', 'v'] have shapes [(4, 3), ",
            (),
            lambda: qkv,
            lambda: {"qkv": torch.zeros(7, 3)},
            {"fused": fused},
        ),
        (
            "'q' has 8 rows in 3 heads, which cannot be divided into 2 shards",
            (),
            lambda: qkv,
            lambda: {"qkv": torch.zeros(8, 3)},
            {"fused": {"qkv": Fused(["q", "k", "v"], (3, 1, 1))}},
        ),
        (
            "got 3 parts and heads=(4, 1)",
            (2, 3),
            lambda: qkv,
            lambda: {"qkv": torch.zeros(8, 3)},
            {"fused": {"qkv": Fused(["q", "k", "v"], (4, 1))}},
        ),
        (
            "with more '*' than the key",
            (2, 3),
            lambda: qkv,
            lambda: {"qkv": torch.zeros(8, 3)},
            {"fused": {"qkv": ["*.q"]}},
        ),
        (
            "into['w'] is a DTensor, but matches fused['w']",
            (2, 3),
            good,
            lambda: {"w": distributed(Shard(0), [2, 3]).detach()},
            {"fused": {"w": ["w", "w"]}},
        ),
    ):
        begin = time.monotonic()
        into = None
        expected = (LayoutError if rank in at_fault else CreationError) if at_fault else None
        with pytest.raises(expected or PlanMismatchError) as caught:
            into = move(make_state, make_into, **more)
        assert message in str(caught.value)
        assert rank in at_fault or "nothing was sent" in str(caught.value)
        assert time.monotonic() - begin < scaled_s(5)
    into = move(good, buffer)
    assert rank < 2 or torch.equal(into["w"], ROWS.chunk(2)[rank - 2])
    into = move(lambda: qkv, lambda: {"qkv": torch.zeros(8, 3)}, fused=fused)
    assert rank < 2 or (into["qkv"] == 1).all()


# Each rank passes the experts that it has and the experts that it needs, by their global numbers.
# The tensor of expert n has the number n in each element.
@pytest.mark.parametrize("text", ["tp=1,ep=4", "tp=2,ep=2"])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.ranks(4)
def test_experts_by_name(text, verify):
    rank = dist.get_rank()
    trainer, engine = RankLayout(text), RankLayout("ep=2,dp=2")
    mapping = RankMapping.weights(trainer, engine)
    mine, needed = (
        range(layout.coords(rank)["ep"] * count, (layout.coords(rank)["ep"] + 1) * count)
        for layout, count in ((trainer, 4 // trainer.size_of("ep")), (engine, 2))
    )
    rows = 6 // trainer.size_of("tp")
    state = {f"experts.{n}.down": torch.full((rows, 3), float(n)) for n in mine}
    into = {f"experts.{n}.down": torch.full((6, 3), -1.0) for n in needed}
    state["router"], into["router"] = torch.arange(4.0), torch.zeros(4)
    shards = {"experts.*": {"tp": 0}, "*": {}}
    for _ in range(2):
        transfer_state(mapping, state, into=into, shards=shards, verify=verify)
        assert {name: one.unique().tolist() for name, one in into.items()} == {
            **{f"experts.{n}.down": [n] for n in needed},
            "router": [0, 1, 2, 3],
        }
        for one in into.values():
            one.zero_()
    if trainer.size_of("tp") > 1:
        if rank == 1:
            state.pop("experts.0.down")
        with pytest.raises(PlanMismatchError, match=r"shard 1 of 2 along axis 0 .*experts\.0"):
            transfer_state(mapping, state, into=into, shards=shards, verify=verify)


# With `verify`, source ranks compare the checksums of parameters that they have in common. Experts
# with local numbers have equal names on both ranks, although they are different parameters.
@pytest.mark.ranks(3)
def test_verify_compares_replicas():
    rank = dist.get_rank()
    mapping = RankMapping.weights(RankLayout("ep=2"), RankLayout([1], ["tp"], 2))
    words = torch.arange(40.0)
    router = words if rank == 0 else words.flip(0).clone()  # the same numbers in another order
    same = {"experts.0": torch.ones(2), "router": words, "none": torch.zeros(0, 3)}
    for wrong, parts in (
        ({}, ()),
        ({"experts.0": torch.full((2,), float(rank))}, ("'experts.0'", "ranks 0 ", "ranks 1;")),
        ({"router": router}, ("'router' in state=",)),
        ({}, ()),
    ):
        into = {name: torch.zeros_like(one) for name, one in same.items()}
        given = {"into": into} if rank == 2 else {"state": {**same, **wrong}}
        if not wrong:
            transfer_state(mapping, **given, verify=True)
            assert rank < 2 or all(torch.equal(into[name], one) for name, one in same.items())
            continue
        with pytest.raises(PlanMismatchError) as caught:
            transfer_state(mapping, **given, verify=True)
        assert all(part in str(caught.value) for part in ("nothing was sent", *parts))
        assert not any(one.any() for one in into.values())


# One call moves all stages of a pipeline, also an embedding that the first and last stage have. A
# mapping with a pipeline sends the last stage only, and the error about the others names it.
@pytest.mark.ranks(3)
def test_pipeline_in_one_call():
    rank = dist.get_rank()
    engine = RankLayout([1], ["tp"], 2)
    names = [["embedding", "layers.0"], ["layers.1", "embedding"], ["embedding", "layers.0"]][rank]
    given = {name: torch.full((2,), float(rank < 2)) for name in names}
    given = {"into": {**given, "layers.1": torch.zeros(2)}} if rank == 2 else {"state": given}
    shards = {"layers.0": {}, "layers.1": {}, "*": {}}  # a pattern may match on other ranks only
    transfer_state(RankMapping.weights("pp=2", engine), **given, shards=shards)
    assert rank < 2 or all(one.tolist() == [1, 1] for one in given["into"].values())
    if rank > 0:
        with pytest.raises(PlanMismatchError, match=r"'layers\.0'.* state= of stage pp=1, which"):
            transfer_state(RankMapping("pp=2", engine, along=None), **given)


# Target tensors may require gradients or be views of other tensors. Source tensors may, too.
@pytest.mark.ranks(3)
def test_parameters_and_views_as_targets():
    rank = dist.get_rank()
    room = torch.zeros(3, 4)
    mapping = RankMapping.weights("dp=1", RankLayout([2], ["dp"], 1))
    state = {"w": nn.Parameter(torch.arange(6.0).reshape(2, 3)), "v": torch.ones(3)}
    into = {"w": nn.Parameter(torch.zeros(2, 3)), "v": room[:, 1]}
    version = into["w"]._version
    if rank == 0:
        transfer_state(mapping, state)
    else:
        transfer_state(mapping, into=into)
        assert torch.equal(into["w"], state["w"])
        assert into["w"].requires_grad
        assert into["w"]._version > version
        assert room.sum(0).tolist() == [0, 3, 0, 0]


# The sender converts the dtype: half the bytes are sent, with the same rounding as `to()`.
@pytest.mark.ranks(3)
def test_sender_converts_dtype():
    rank = dist.get_rank()
    whole = torch.randn(64, 64, generator=torch.Generator().manual_seed(5))
    mapping = RankMapping.weights("dp=1", RankLayout([2], ["dp"], 1))
    sizes = []
    post = mover.post

    def counting(receives, sends, *more):
        sizes.extend(buffer.numel() for _, buffer in sends)
        return post(receives, sends, *more)

    state = {"w": whole, "steps": torch.tensor(7)}
    into = {"w": torch.zeros(64, 64).bfloat16(), "steps": torch.tensor(0)}
    with mock.patch.object(mover, "post", counting):
        given = {"state": state} if rank == 0 else {"into": into}
        transfer_state(mapping, **given, dtype=torch.bfloat16)
    assert sum(sizes) == (2 * (64 * 64 * 2 + 8) if rank == 0 else 0)
    if rank > 0:
        assert torch.equal(into["w"], whole.bfloat16())
        assert into["steps"] == 7


# A second transfer with the same names, shapes and mapping makes no plan, and needs only one
# agreement. If one rank has lost its plan, or passes other shapes, all ranks plan again.
@pytest.mark.ranks(3)
def test_plan_is_cached():
    rank = dist.get_rank()
    mapping = RankMapping.weights("tp=2", RankLayout([1], ["dp"], 2))
    calls = []

    def counted(owner, name):
        real = getattr(owner, name)

        def wrapper(*args, **more):
            calls.append(name)
            return real(*args, **more)

        return mock.patch.object(owner, name, wrapper)

    def move(rows, number):
        """Transfer `rows` rows. The first rank has four rows, and the second has the rest."""
        calls.clear()
        whole = torch.arange(float(rows)) + number
        into = {"w": torch.zeros(rows)}
        given = {"into": into} if rank == 2 else {"state": {"w": [whole[:4], whole[4:]][rank]}}
        with (
            counted(module, "plan_of"),
            counted(module, "match_tensors"),
            counted(Exchange, "agree"),
        ):
            shards = {"w": {"tp": 0}}
            transfer_state(mapping, **given, shards=shards)
        assert rank < 2 or torch.equal(into["w"], whole)
        return sorted(calls)

    again = ["agree", "agree", "match_tensors", "plan_of"]
    assert move(8, 0) == again
    assert move(8, 1) == ["agree"]
    if rank == 1:
        module._plans.clear()
    assert move(8, 2) == again
    assert move(7, 3) == again  # the first rank passes the same shapes as before
    assert move(7, 4) == ["agree"]
    assert move(8, 5) == again


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
