"""What real ranks run in the tests of whole states."""

import torch
import torch.distributed as dist

from hypercomm import RankLayout, RankMapping, transfer_state
from hypercomm.errors import HyperCommError
from hypercomm.transfers import state as module

SHARDS = {"*.qkv.weight": {"tp": 0}, "*.proj.weight": {"tp": 1}, "embedding": {"tp": 0}, "*": {}}


def whole_state(layers=3, hidden=24):
    """All parameters, unsplit, alike on every rank: mixed types, a scalar, an empty one."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype)

    state = {"embedding": random(48, hidden), "steps": torch.tensor(7), "none": torch.zeros(0, 3)}
    for layer in range(layers):
        state[f"{layer}.qkv.weight"] = random(3 * hidden, hidden, dtype=torch.bfloat16)
        state[f"{layer}.proj.weight"] = random(hidden, 2 * hidden)
        state[f"{layer}.norm"] = random(hidden)
        state[f"{layer}.mask"] = random(5) > 0
    return state


def part_of(name, tensor, layout, rank):
    """What a rank has of a whole tensor, by torch's own chunks."""
    axis = 1 if name.endswith("proj.weight") else 0
    if not name.endswith(("qkv.weight", "proj.weight", "embedding")):
        return tensor.clone()
    coords = layout.coords(rank)
    return tensor.chunk(layout.size_of("tp", default=1), axis)[coords.get("tp", 0)].clone()


def parts(whole, layout, rank):
    return {name: part_of(name, tensor, layout, rank) for name, tensor in whole.items()}


def strided(tensor):
    """The same numbers, not contiguous."""
    if tensor.ndim < 2:
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.t().contiguous().t()


def arrivals(cases, verify):
    """Whether all of a state has arrived on this rank, as numpy's splits say; for each case."""
    rank, seen, whole = dist.get_rank(), [], whole_state()
    module._LARGE = 256  # so that some are
    for text, other, offset, bucket_bytes in cases:
        source, target = RankLayout.parse(text), RankLayout.parse(other, rank_offset=offset)
        mapping = RankMapping(source, target, along=None)
        state = (
            {k: v if "0" in k else strided(v) for k, v in parts(whole, source, rank).items()}
            if rank in source
            else None
        )
        wanted = parts(whole, target, rank) if rank in target else None
        into = None
        if wanted is not None:
            zeros = {k: torch.zeros_like(v) for k, v in reversed(wanted.items())}
            into = {k: v if "1" in k else strided(v) for k, v in zeros.items()}
        buckets = transfer_state(
            mapping, state, into=into, shards=SHARDS, bucket_bytes=bucket_bytes, verify=verify
        )
        right = wanted is None or all(torch.equal(into[k], wanted[k]) for k in wanted)
        seen.append((buckets, right))
    return seen


def flipped():
    """What each rank hears when one byte changes on the way, and that going on mends it."""
    rank, whole = dist.get_rank(), whole_state()
    source, target = RankLayout.parse("tp=2"), RankLayout([2], ["tp"], 2)
    mapping = RankMapping(source, target, along=None)
    mine = parts(whole, source, rank) if rank < 2 else None
    wanted = parts(whole, target, rank) if rank >= 2 else {}
    into = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()} or None
    post, calls = module.post, []

    def flip(receives, sends):
        calls.append(1)
        if len(calls) == 3 and rank == 1:
            sends[0][1][5] ^= 4
        return post(receives, sends)

    module.post = flip

    def move(**more):
        return transfer_state(
            mapping, mine, into=into, shards=SHARDS, bucket_bytes=2048, verify=True, **more
        )

    try:
        move()
        heard = None
    except HyperCommError as error:
        heard = type(error).__name__, str(error), error.bucket
    finally:
        module.post = post
    for tensor in (into or {}).values():
        tensor.zero_()
    buckets = move(start=heard[2])
    first = move(start=buckets)
    left = sum(not torch.equal(into[name], wanted[name]) for name in wanted)
    move()
    right = all(torch.equal(into[name], wanted[name]) for name in wanted)
    return heard, buckets, first, left, right


def resumed():
    """What is missing when one rank's communication fails, and that going on brings the rest."""
    rank, whole = dist.get_rank(), whole_state()
    source, target = RankLayout.parse("tp=2"), RankLayout([2], ["tp"], 2)
    mapping = RankMapping(source, target, along=None)
    mine = parts(whole, source, rank) if rank < 2 else None
    wanted = parts(whole, target, rank) if rank >= 2 else {}
    into = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()} or None
    post, calls = module.post, []

    def fail(receives, sends):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("the cable was pulled")
        return post(receives, sends)

    def move(**more):
        return transfer_state(mapping, mine, into=into, shards=SHARDS, bucket_bytes=2048, **more)

    module.post = fail
    try:
        move()
        error = None
    except HyperCommError as caught:
        error = caught
    module.post = post
    missing = sum(not torch.equal(into[name], wanted[name]) for name in wanted)
    dist.barrier()  # what follows stands for a job that was started anew
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    move(start=error.bucket)
    right = all(torch.equal(into[name], wanted[name]) for name in wanted)
    return str(error), error.bucket, missing, right


def refusals():
    """What both ends hear of what does not fit; nothing was sent, so a right call still works."""
    rank, words = dist.get_rank(), {}
    mapping = RankMapping("tp=1", RankLayout([2], ["tp"], 1), along=None)
    good = {"b.weight": torch.ones(4, 2), "b.bias": torch.ones(4)}
    cut = {**good, "b.weight": torch.ones(2, 2)}

    def heard(name, state=good, into=cut, **more):
        mine = {"state": state} if rank == 0 else {"into": into}
        more = {"shards": {"*.weight": {"tp": 0}, "*": {}}, **more}
        given = {
            key: value[min(rank, 1)] if isinstance(value, tuple) else value
            for key, value in more.items()
        }
        try:
            transfer_state(mapping, **mine, **given)
            words[name] = None
        except HyperCommError as error:
            words[name] = f"{type(error).__name__}: {error}"

    heard("keys", into={**cut, "a.scale": torch.ones(1)})
    heard("fewer", into={"b.bias": torch.ones(4), "c.weight": torch.ones(1)})
    heard("shapes", into={**cut, "b.weight": torch.ones(2, 4)})
    heard("dtypes", into={**cut, "b.weight": torch.ones(2, 2).half()})
    heard("no target tensors", into=None)
    heard("no tensors", state={})
    heard("a pattern", shards=({"*": {}, "lm_head": {}}, {"*": {}}))
    heard("a dim", shards=({"*": {"qp": 0}}, {"*": {}}))
    heard("an axis", shards={"*.weight": {"tp": 2}, "*": {}})
    heard("not even", state={**good, "b.weight": torch.ones(3, 2)})
    heard("buckets", bucket_bytes=(0, 1 << 20))
    heard("other buckets", bucket_bytes=(1 << 21, 1 << 20))
    heard("a start", start=(9, 0))
    heard("right")
    return words


def overlapping():
    """A rank in both ends: what stays may stay in its memory, what is still sent may not."""
    rank = dist.get_rank()
    mapping = RankMapping("tp=2", "tp=1,dp=2", along=None)
    mine = {"a": torch.full((2,), float(rank)), "b": torch.arange(3.0)}
    shards = {"a": {"tp": 0}, "b": {}}
    room = torch.empty(6)
    room[:2] = mine["a"]
    words = []
    for state, into in (
        ({**mine, "a": room[:2]}, {"a": room[1:5], "b": torch.zeros(3)}),
        (mine, {"a": torch.zeros(4)}),
        (mine, {"a": torch.zeros(4), "b": torch.zeros(4)}),
        (mine, {"a": torch.zeros(4), "b": mine["b"]}),
    ):
        try:
            transfer_state(mapping, state, into=into, shards=shards)
            words.append((into["a"].tolist(), into["b"].tolist()))
        except HyperCommError as error:
            words.append(str(error))
    return words
