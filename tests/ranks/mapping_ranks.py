"""What real ranks run in the tests of mappings, and numpy's view of who holds what."""

import math
import time

import attrs
import numpy as np
import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid, RankLayout, RankMapping, transfer
from hypercomm.errors import HyperCommError

HIDDEN, INNER, BATCH, SEQUENCE = 3, 8, 8, 4


# ---- the independent source ---------------------------------------------------------------------


@attrs.frozen
class Case:
    """Two numberings of ranks, and what is to move between them; no code of ours in here.

    `source` and `target` are (shape, dim names, ranks in numbering order).
    """

    source: tuple
    target: tuple
    along: str | None
    batch_axis: int
    shards: dict
    pipeline: str | None
    units: tuple
    leaders: bool = False

    def mapping(self):
        return RankMapping(
            layout_of(self.source),
            layout_of(self.target),
            self.along,
            batch_axis=self.batch_axis,
            shards=self.shards,
            pipeline=self.pipeline,
            leaders=self.leaders,
        )

    def dims_of_axis(self, *, in_order=False):
        """Which dims cut each of three tensor axes, outermost first; the axes in order of need."""
        dims = {} if in_order else {0: [], 1: [], 2: []}
        batch = [] if self.along is None else [(self.along, self.batch_axis)]
        for dim, axis in [*batch, *self.shards.items()]:
            dims.setdefault(axis % 3, []).append(dim)
        return dims | {axis: dims.get(axis, []) for axis in range(3)}

    def shape(self):
        """A tensor's shape that both sides can cut."""
        sides = [dict(zip(side[1], side[0], strict=True)) for side in (self.source, self.target)]
        return tuple(
            math.lcm(*(math.prod(side.get(dim, 1) for dim in dims) for side in sides)) * units
            for dims, units in zip(self.dims_of_axis().values(), self.units, strict=True)
        )

    def held(self, side, stage):
        """For each rank of a stage, the indices that it holds along each axis."""
        shape, names, ranks = side
        held = {}
        for position, rank in enumerate(ranks):
            index = np.unravel_index(position, shape, order="F")  # the first dim varies fastest
            coords = {name: int(i) for name, i in zip(names, index, strict=True)}
            sizes = dict(zip(names, shape, strict=True))
            if self.pipeline in names and coords[self.pipeline] != stage % sizes[self.pipeline]:
                continue
            axes = []
            for length, dims in zip(self.shape(), self.dims_of_axis().values(), strict=True):
                indices = np.arange(length)
                for dim in dims:
                    indices = np.split(indices, sizes.get(dim, 1))[coords.get(dim, 0)]
                axes.append(indices)
            held[rank] = axes
        return held


def layout_of(side):
    shape, names, ranks = side
    first = ranks[0]
    if list(ranks) == list(range(first, first + len(ranks))):
        return RankLayout(shape, names, first)
    return RankLayout(shape, names, ranks=ranks)


# ---- any pair of layouts ------------------------------------------------------------------------


def global_indices(axes):
    """The numbers of a tensor's elements that lie at these indices of its three axes."""
    (_, second, third), (rows, columns, depths) = axes[1], axes[0]
    return torch.from_numpy(
        rows[:, None, None] * second * third + columns[None, :, None] * third + depths
    )


def deliver(case, held, wanted, mapping, groups, *, verify):
    """Transfer the numbers of the elements; the greatest difference from what is wanted here."""
    rank, shape = dist.get_rank(), case.shape()
    mine, due = (
        None if rank not in side else global_indices((side[rank], shape)) for side in (held, wanted)
    )
    for target in mapping.target_ranks:  # every rank makes every group, in one order
        siblings = mapping.broadcast_siblings(target)
        if mapping.leaders and len(siblings) > 1 and siblings not in groups:
            groups[siblings] = dist.new_group(list(siblings))
    is_member = mapping.leaders and due is not None
    group = groups.get(mapping.broadcast_siblings(rank)) if is_member else None
    given = mine if mine is not None else None if due is None else torch.full_like(due, -1)
    got = transfer(mapping, given, group, verify=verify)
    if due is None:
        return got is None
    return torch.equal(got, due) and (mine is not None or got is given)


def deliveries(cases, modes):
    """Whether each case arrives, there and back, in each mode.

    Groups live to the end: torch may close one while a member still connects.
    """
    seen, groups = [], {}
    for case in cases:
        held, wanted = case.held(case.source, -1), case.held(case.target, 0)
        for leaders, verify in modes:
            mapping = attrs.evolve(case, leaders=leaders).mapping()
            there = deliver(case, held, wanted, mapping, groups, verify=verify)
            back = deliver(case, wanted, held, mapping.inverse(), groups, verify=verify)
            seen.append((there, back))
    return seen


# ---- two models and the bridge between them -----------------------------------------------------


def weights(name, stage):
    """The two matrices of a stage of a module, unsplit."""
    generator = torch.Generator().manual_seed(sum(name.encode()) + stage)
    shapes = (HIDDEN, INNER), (INNER, HIDDEN)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]


def data(which):
    """The input or the target of all, unsplit: (batch, sequence, hidden)."""
    generator = torch.Generator().manual_seed(which)
    return torch.randn((BATCH, SEQUENCE, HIDDEN), generator=generator, dtype=torch.float64)


def unsplit(encoder_stages, llm_stages):
    """The loss, and the gradient of each weight, in one process by autograd."""
    made, hidden = {}, data(0)
    for name, stages in (("encoder", encoder_stages), ("llm", llm_stages)):
        for stage in range(stages):
            first, second = made[name, stage] = weights(name, stage)
            hidden = hidden + torch.tanh(hidden @ first) @ second
    loss = ((hidden - data(1)) ** 2).sum() / 2
    loss.backward()
    return loss.item(), {key: [w.grad for w in pair] for key, pair in made.items()}


def total(tensor, group):
    """The sum over a group, or the tensor where there is none."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


class Module:
    """One stage of a module on this rank: x + tanh(x A) B, with A and B split over tp."""

    def __init__(self, name, layout):
        self.layout, self.rank = layout, dist.get_rank()
        self.grid = HyperCommGrid(layout.shape, layout.dim_names, layout.rank_offset, name=name)
        self.tp = self.grid.create_pg("tp") if "tp" in layout.dim_names else None
        copies = [dim for dim in ("dp", "cp") if dim in layout.dim_names]
        self.copies = self.grid.create_pg(copies)
        self.here = self.rank in layout
        if not self.here:
            return
        self.coords = layout.coords(self.rank)
        self.stage = self.coords.get("pp", 0)
        self.is_first, self.is_last = (
            self.stage == 0,
            self.stage == layout.size_of("pp", default=1) - 1,
        )
        at, of = self.coords.get("tp", 0), layout.size_of("tp", default=1)
        first, second = weights(name, self.stage)
        self.first = first.detach().chunk(of, 1)[at].clone().requires_grad_()
        self.second = second.detach().chunk(of, 0)[at].clone().requires_grad_()

    def shard(self, tensor):
        """This rank's part of an unsplit tensor, by numpy's splits."""
        for axis, dim in enumerate(("dp", "cp")):
            parts = tensor.chunk(self.layout.size_of(dim, default=1), axis)
            tensor = parts[self.coords.get(dim, 0)]
        return tensor.contiguous()

    def empty(self):
        return torch.full_like(self.shard(data(0)), float("nan"))

    def neighbour(self, by):
        return self.layout.shift(self.rank, "pp", by)

    def forward(self, hidden):
        """Through all stages: what the last one makes, None on the others."""
        if not self.is_first:
            hidden = self.empty()
            dist.recv(hidden, self.neighbour(-1))
        self.hidden = hidden.detach().requires_grad_()
        self.partial = torch.tanh(self.hidden @ self.first) @ self.second
        made = self.hidden.detach() + total(self.partial.detach().clone(), self.tp)
        if self.is_last:
            return made
        dist.send(made, self.neighbour(1))
        return None

    def backward(self, gradient):
        """Back through all stages: the gradient of what came in, None but on the first."""
        if not self.is_last:
            gradient = self.empty()
            dist.recv(gradient, self.neighbour(1))
        self.partial.backward(gradient)
        gradient = gradient + total(self.hidden.grad, self.tp)
        for weight in (self.first, self.second):
            total(weight.grad, self.copies)
        if self.is_first:
            return gradient
        dist.send(gradient, self.neighbour(-1))
        return None


def bridged(encoder_layout, llm_layout, *, leaders):
    """One step of both modules: this rank's part of the loss, and of the weights' gradients."""
    encoder, llm = Module("encoder", encoder_layout), Module("llm", llm_layout)
    mapping = RankMapping(encoder_layout, llm_layout, leaders=leaders)
    rank = dist.get_rank()

    def cross(way, made, module):
        """Carry what this rank has made over the bridge to a module's stage."""
        is_target = rank in way.target_ranks
        given = made if made is not None else module.empty() if is_target else None
        return transfer(way, given, module.tp if leaders and is_target else None)

    output = encoder.forward(encoder.shard(data(0))) if encoder.here else None
    hidden = cross(mapping, output, llm)
    made = llm.forward(hidden) if llm.here else None
    loss, gradient = None, None
    if made is not None:
        difference = made - llm.shard(data(1))
        loss, gradient = (difference**2).sum().item() / 2, difference
    gradient = llm.backward(gradient) if llm.here else None
    gradient = cross(mapping.inverse(), gradient, encoder)
    if encoder.here:
        encoder.backward(gradient)
    if loss is not None and llm.coords.get("tp", 0):
        loss = None  # counted once
    found = {
        (name, module.stage, module.coords.get("tp", 0)): (module.first.grad, module.second.grad)
        for name, module in (("encoder", encoder), ("llm", llm))
        if module.here
    }
    llm.grid.destroy()
    encoder.grid.destroy()
    return loss, found


def bridges(pairs):
    """All pairs of layouts (text and offset of each), without and with leaders."""
    layouts = [
        tuple(RankLayout.parse(text, rank_offset=offset) for text, offset in pair) for pair in pairs
    ]
    return [bridged(*pair, leaders=leaders) for pair in layouts for leaders in (False, True)]


# ---- what tensors may be ------------------------------------------------------------------------


def odd_tensors():
    """Two ranks to two others, and one in neither: tensors of every kind arrive."""
    rank, seen = dist.get_rank(), {}
    mapping = RankMapping(
        RankLayout.parse("dp=2"), RankLayout([2], ["tp"], 2), batch_axis=-1, pipeline=None
    )

    def move(whole, buffer=None):
        mine = whole.chunk(2, -1)[rank % 2] if rank < 2 else None
        given = torch.zeros_like(whole) if buffer is None else buffer
        got = transfer(mapping, mine if rank < 2 else given)
        return got is None if rank < 2 or rank > 3 else torch.equal(got, whole) and got is given

    whole = torch.arange(24, dtype=torch.float64).reshape(3, 2, 4)
    seen["whole"] = move(whole)
    for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.complex64):
        seen[str(dtype)] = move((whole % 7 - 3).to(dtype))
    seen["conjugated"] = move(torch.complex(whole, whole + 1).conj())
    strided = torch.zeros(4, 2, 3, dtype=torch.float64).permute(2, 1, 0)
    seen["strided"] = move(whole, strided)
    seen["into conjugated"] = move(
        torch.complex(whole, whole), torch.zeros(3, 2, 4, dtype=torch.complex128).conj()
    )
    seen["part of another"] = move(whole, torch.zeros(3, 2, 9, dtype=torch.float64)[..., 2:6])
    seen["empty"] = move(torch.zeros(3, 0, 4))
    seen["no rows"] = move(torch.zeros(3, 2, 0))
    seen["a vector"] = move(torch.arange(6))
    seen["with a gradient"] = move(whole.clone().requires_grad_(), whole * 0)
    seen["into a leaf"] = move(whole, torch.zeros_like(whole).requires_grad_())
    seen["expanded"] = move(torch.ones(3, 1, 1).expand(3, 2, 4))
    if rank == 4:
        seen["junk where it does not matter"] = transfer(mapping, 3, "x", out=[]) is None
    return seen


def refusals():
    """What each rank hears about wrong arguments; nothing was sent, so a right call still works."""
    rank, words = dist.get_rank(), {}
    apart = RankMapping(RankLayout.parse("dp=2"), RankLayout([2], ["tp"], 2))
    led = attrs.evolve(apart, leaders=True)
    both = RankMapping(RankLayout.parse("dp=4"), RankLayout.parse("tp=2,dp=2"))
    lone = dist.new_group([0, 1])
    right = torch.arange(4.0).reshape(2, 2) if rank < 2 else torch.zeros(4, 2)

    def refused(name, call):
        try:
            call()
        except HyperCommError as error:
            words[name] = f"{type(error).__name__}: {error}"

    refused("no tensor", lambda: transfer(apart, [1.0]))
    refused("nothing", lambda: transfer(apart, None))
    refused("no axis", lambda: transfer(apart, torch.tensor(1.0)))
    refused("meta", lambda: transfer(apart, torch.zeros(2, 2, device="meta")))
    refused("sparse", lambda: transfer(apart, torch.zeros(2, 2).to_sparse()))
    if rank > 1:  # what receivers alone can get wrong
        refused("length", lambda: transfer(apart, torch.zeros(3, 2)))
        refused("expanded", lambda: transfer(apart, torch.zeros(1).expand(2)))
        refused("unfolded", lambda: transfer(apart, torch.zeros(4).unfold(0, 2, 1)[:2]))
        computed = torch.ones(4, 2, requires_grad=True) * 2
        refused("computed", lambda: transfer(apart, computed))
        refused("no groups", lambda: transfer(led, right))
        refused("no member", lambda: transfer(led, right, dist.GroupMember.NON_GROUP_MEMBER))
        refused("wrong group", lambda: transfer(led, right, dist.group.WORLD))
    refused("out", lambda: transfer(apart, right, out=torch.zeros(2, 2)))
    refused("verify", lambda: transfer(apart, right, verify=3))
    quantized = torch.quantize_per_tensor(torch.zeros(2, 2), 0.1, 0, torch.qint8)
    refused("quantized", lambda: transfer(apart, quantized))
    refused("groups", lambda: transfer(apart, right, 3))
    refused("a group in vain", lambda: transfer(both, right, dist.group.WORLD))
    mine = torch.full((2, 2), float(rank))
    refused("out's shape", lambda: transfer(both, mine, out=torch.zeros(2, 2)))
    refused("out's type", lambda: transfer(both, mine, out=torch.zeros(4, 2, dtype=torch.int64)))
    shared = torch.zeros(6, 2)
    refused("out's memory", lambda: transfer(both, shared[:2], out=shared[1:5]))
    refused("out's rows", lambda: transfer(both, shared[::3], out=shared[1:5]))
    large = RankMapping(RankLayout.parse("dp=2"), RankLayout([8], ["dp"]))
    refused("too large", lambda: transfer(large, mine))
    arena = torch.zeros(6, 2)
    arena[:2] = rank
    got = transfer(both, arena[:2], out=arena[2:])
    if rank < 2:
        dist.destroy_process_group(lone)
    return words, transfer(apart, right), got


def groups_that_do_not_matter():
    """A bridge of leaders with every group that torch hands out, and what arrives on each rank."""
    rank = dist.get_rank()
    mapping = RankMapping(RankLayout([1], ["dp"]), RankLayout([2], ["tp"], 1), leaders=True)
    pair = dist.new_group([1, 2])  # NON_GROUP_MEMBER on rank 0
    got = transfer(mapping, torch.tensor([7.0, 8.0]) if rank == 0 else torch.zeros(2), pair)
    one = RankMapping(RankLayout([1], ["dp"]), RankLayout([1], ["dp"], 1))
    plain = transfer(one, torch.full((1,), rank + 3.0), dist.GroupMember.NON_GROUP_MEMBER)
    led = attrs.evolve(one, leaders=True)
    lone = transfer(led, torch.full((1,), rank + 5.0), dist.group.WORLD)
    return [None if found is None else found.tolist() for found in (got, plain, lone)]


def interleaved_memory():
    """Columns of one tensor are sent while its other columns receive."""
    rank = dist.get_rank()
    mapping = RankMapping(RankLayout([2], ["dp"]), RankLayout([2], ["dp"], ranks=[1, 0]))
    whole = torch.full((3, 8), float(rank))
    transfer(mapping, whole[:, :4], out=whole[:, 4:])
    return whole.tolist()


def overwritten():
    """Whether autograd notices that a tensor, which it keeps, was received into."""
    rank = dist.get_rank()
    mapping = RankMapping(RankLayout([1], ["dp"]), RankLayout([1], ["dp"], 1))
    buffer, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    loss = (buffer * weight).sum()
    transfer(mapping, buffer)
    with torch.inference_mode():  # has no versions to count
        transfer(mapping, torch.ones(3))
    if rank == 0:
        return None
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "unnoticed"


def mismatches():
    """What each rank of a verified transfer hears; then one that goes through."""
    rank, words = dist.get_rank(), []
    one, two = RankLayout([1], ["dp"]), RankLayout([2], ["dp"], 1)
    mapping = RankMapping(one, two)
    other = RankMapping(one, two, batch_axis=1)
    led = RankMapping(one, RankLayout([2], ["tp"], 1), leaders=True)
    pair = dist.new_group([1, 2])

    def told(transfer):
        try:
            found = transfer()
        except HyperCommError as error:
            words.append(f"{type(error).__name__}: {error}")
        else:
            words.append(None if found is None else found.tolist())

    whole = torch.arange(4.0).reshape(2, 2)
    given = whole if rank == 0 else torch.zeros(1, 2)
    odd = {1: torch.zeros(1, 2, dtype=torch.int32)}
    told(lambda: transfer(mapping, odd.get(rank, given), verify=True))  # another dtype
    odd = {1: torch.zeros(1, 3)}
    told(lambda: transfer(mapping, odd.get(rank, given), verify=True))  # another shape
    told(lambda: transfer(mapping, None if rank == 2 else given, verify=True))  # no tensor
    square = whole if rank == 0 else torch.zeros(1 + (rank == 2), 2 - (rank == 2))
    told(lambda: transfer(other if rank == 2 else mapping, square, verify=True))  # another mapping
    led_given = whole if rank == 0 else torch.zeros(2, 2 + (rank == 2))
    told(lambda: transfer(led, led_given, pair, verify=True))  # another shape in the broadcast
    told(lambda: transfer(mapping, given, verify=True))
    return words


def lone(rank):
    """A layout of one rank."""
    return RankLayout([1], ["dp"], rank)


def timed(source, target, tensor):
    """What a verified transfer returns or raises, and how many seconds it takes."""
    begin = time.monotonic()
    try:
        found = transfer(RankMapping(source, target), tensor, verify=True)
    except HyperCommError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return None if found is None else found.tolist(), time.monotonic() - begin


def ends_that_differ():
    """Rank 2 expects another replica to send; then all wait in a circle; after each, right ones."""
    rank, calls = dist.get_rank(), []
    right, wrong = RankLayout([2], ["tp"]), RankLayout([2], ["tp"], ranks=[1, 0])
    mine = torch.full((2,), 5.0 + rank)
    calls.append(timed(wrong if rank == 2 else right, lone(2), mine))
    mine = torch.full((2,), 5.0 + rank)
    calls.append(timed(right, lone(2), mine))
    source, target = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[rank]
    calls.append(timed(lone(source), lone(target), mine))
    mine = torch.full((2,), 10.0 + rank)
    whole = RankLayout([2], ["tp"], 1)
    calls.append(timed(lone(0), whole, mine))
    mine = torch.full((2,), 10.0 + rank)
    calls.append(timed(lone(1), lone(2), mine))
    return calls


def one_does_not_come():
    """Rank 2 comes to a transfer of all only after the timeout of the others."""
    rank = dist.get_rank()
    if rank:
        transfer(RankMapping(lone(1), lone(2)), torch.tensor([rank]), verify=True)
    whole = torch.tensor([0.0, 0.0, 1.0, 1.0])
    both = RankLayout([2], ["dp"], 1)
    given = whole if rank == 0 else torch.zeros(2)
    if rank == 2:
        time.sleep(5)
        first = None, 0.0
    else:
        first = timed(lone(0), both, given)
    return first, timed(lone(0), both, given)[0]


def causal():
    """Whether a sequence in causal order arrives, in order and in another's, and comes back."""
    rank, seen = dist.get_rank(), []
    whole = torch.arange(2 * 24 * 3).reshape(2, 24, 3)

    def zigzag(size, at):
        chunks = whole.chunk(2 * size, 1)
        return torch.cat([chunks[at], chunks[2 * size - 1 - at]], 1)

    def move(mapping, mine, wanted):
        got = transfer(mapping, mine if mine is not None else torch.full_like(wanted, -1))
        seen.append(wanted is None or torch.equal(got, wanted))

    here, there = RankLayout.parse("cp=2"), RankLayout([3], ["cp"], 1)
    for target, cut in ((there, 1), (there.rename(cp="sp"), 1)):
        is_causal = target is there
        shards = {"cp": "zigzag"} if is_causal else {"cp": "zigzag", "sp": cut}
        mapping = RankMapping(here, target, None, shards=shards)
        mine = zigzag(2, rank) if rank < 2 else None
        wanted = None
        if rank >= 1:
            wanted = zigzag(3, rank - 1) if is_causal else whole.chunk(3, 1)[rank - 1]
        move(mapping, mine, wanted)
        move(mapping.inverse(), wanted, mine)
    return seen
