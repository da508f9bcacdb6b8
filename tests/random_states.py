"""Draws states for `transfer_state`. torch.chunk computes the expected shard of each rank."""

from types import SimpleNamespace

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hypercomm import Fused, RankLayout, RankMapping

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def chunk(tensor, axis, count, at, pieces=1):
    """Return a shard of torch.chunk. A strided shard has a part of each of several pieces."""
    whole = [part.chunk(count, axis) for part in tensor.chunk(pieces, axis)]
    found = [parts[at] for parts in whole if at < len(parts)]
    return torch.cat(found, axis) if found else tensor.narrow(axis, 0, 0)


def strided(tensor):
    """Return an equal tensor that is not contiguous."""
    if tensor.ndim < 2:
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def parameter(tensor):
    """Return an equal tensor that requires a gradient, if it may."""
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


def of_inference(tensor):
    """Return an equal tensor of inference mode."""
    with torch.inference_mode():
        return tensor.clone()


KINDS = (torch.clone, strided, parameter, of_inference)


def pick(random, *choices):
    return choices[int(random.integers(len(choices)))]


def is_of_fsdp(first, second, size):
    """Return whether FSDP2 has these placements: it splits what the second mesh dim has split."""
    is_strided = isinstance(first, _StridedShard) and first.split_factor == size
    return is_strided and type(second) is Shard and first.dim == second.dim


class End:
    """The source or target of a transfer: a layout of two dims, and the splits of parameters."""

    def __init__(self, random, world, names):
        count = int(random.integers(1, min(world, 4) + 1))
        first = pick(random, *[n for n in range(1, count + 1) if count % n == 0])
        self.sizes = {names[0]: first, names[1]: count // first}
        self.layout = RankLayout(self.sizes, rank_offset=int(random.integers(world - count + 1)))
        self.cuts, self.placements, self.owners = {}, {}, {}

    def draw(self, random, name, whole):
        """Choose how a parameter is split: by dims along axes, or as a DTensor."""
        axes = [*range(whole.ndim)]
        if axes and random.random() < 0.5:
            choices = [Replicate(), Shard(pick(random, *axes)), Shard(pick(random, *axes))]
            choices += [_StridedShard(pick(random, *axes), split_factor=pick(random, 2, 3))]
            self.placements[name] = [pick(random, *choices) for _ in self.sizes]
        else:
            dims = [dim for dim in self.sizes if axes and random.random() < 0.7]
            self.cuts[name] = {dim: pick(random, *axes) for dim in dims}

    def draw_owner(self, random, name):
        """Choose the ranks that have a parameter as a whole, such as an expert."""
        dim = pick(random, *self.sizes)
        self.cuts[name], self.owners[name] = {}, (dim, int(random.integers(self.sizes[dim])))

    def has(self, name, rank):
        """Return whether a rank passes a part of a parameter."""
        if rank not in self.layout:
            return False
        dim, index = self.owners.get(name, (next(iter(self.sizes)), None))
        return index in (None, self.layout.coords(rank)[dim])

    def part(self, name, whole, rank):
        """Return the shard of a full tensor that a rank has."""
        coords = self.layout.coords(rank)
        if name in self.placements:
            first, second = self.placements[name]
            dims = list(self.sizes)
            splits = [(first, dims[0]), (second, dims[1])]
            if is_of_fsdp(first, second, self.sizes[dims[1]]):
                splits = [(second, dims[1]), (Shard(first.dim), dims[0])]
            for placement, dim in splits:
                if not placement.is_replicate():
                    pieces = getattr(placement, "split_factor", 1)
                    whole = chunk(whole, placement.dim, self.sizes[dim], coords[dim], pieces)
        else:
            for dim, axis in self.cuts[name].items():
                whole = chunk(whole, axis, self.sizes[dim], coords[dim])
        return whole.clone()

    def mesh(self):
        """Return the ranks in the order of a mesh with the dims of the layout."""
        return torch.tensor(self.layout.ranks).reshape([*self.sizes.values()][::-1]).T


class Case:
    """A transfer of parameters from source to target, sometimes with experts or a fused parameter.

    Args:
        random: A generator of numpy.
        world: The number of ranks.
        distribute: A function that makes a DTensor from a shard, the full tensor, the `End`, the
            name and the rank.
        kinds: Functions that return a tensor of the kinds that ranks pass.
    """

    def __init__(self, random, world, distribute, kinds=KINDS):
        self.distribute, self.kinds = distribute, kinds
        self.source, self.target = End(random, world, "ab"), End(random, world, "cd")
        self.mapping = RankMapping.weights(self.source.layout, self.target.layout)
        self.dtype = pick(random, None, None, torch.bfloat16, torch.float16)
        self.options = {"bucket_bytes": pick(random, 1024, 1 << 20), "dtype": self.dtype}
        self.options["verify"] = bool(random.random() < 0.3)
        self.fused, self.wholes, self.wanted = {}, {}, {}
        for number in range(int(random.integers(1, 4))):
            shape = [int(random.integers(12)) for _ in range(int(random.integers(4)))]
            self._add(random, f"{number}.w", shape, pick(random, *DTYPES))
        if random.random() < 0.5:
            self._add_fused(random)
        for number in range(int(random.integers(3))):
            self._add(random, f"experts.{number}", [int(random.integers(400))], torch.float32, True)

    def _add(self, random, name, shape, dtype, is_expert=False, is_part=False):
        whole = torch.from_numpy(random.integers(0, 100, shape)).reshape(shape).to(dtype)
        self.wholes[name] = whole
        for end in (self.source,) if is_part else (self.source, self.target):
            end.draw_owner(random, name) if is_expert else end.draw(random, name, whole)
        if not is_part:
            self.wanted[name] = whole

    def _add_fused(self, random):
        """Add q, k and v, with heads or of any lengths. A target dim splits the fused tensor."""
        count = self.target.sizes["c"]
        width = int(random.integers(1, 4))
        parts = ["x.q", "x.k", "x.v"]
        heads = None
        lengths = random.integers(0, 9, 3)
        if random.random() < 0.6:
            few = pick(random, *[n for n in (1, 2, 3, 4) if n % count == 0 or count % n == 0])
            heads = (few * count, few, few)
            lengths = [number * width for number in heads]
        for name, length in zip(parts, lengths, strict=True):
            self._add(random, name, [int(length), 3], torch.float32, is_part=True)
        self.fused["*.qkv"] = (
            Fused(["*.q", "*.k", "*.v"], heads) if heads else ["*.q", "*.k", "*.v"]
        )
        self.heads = heads or (0, 0, 0)
        self.target.cuts["x.qkv"] = {"c": 0}
        self.wanted["x.qkv"] = None

    def due(self, name, rank):
        """Return the tensor that a target rank must receive."""
        if self.wanted[name] is not None:
            return self.convert(self.target.part(name, self.wanted[name], rank))
        count, at = self.target.sizes["c"], self.target.layout.coords(rank)["c"]
        found = []
        for part, heads in zip(("x.q", "x.k", "x.v"), self.heads, strict=True):
            whole = self.wholes[part]
            if heads and heads < count:
                found.append(whole.chunk(heads)[at * heads // count])
            else:
                found.append(chunk(whole, 0, count, at))
        return self.convert(torch.cat(found))

    def convert(self, tensor):
        return tensor.to(self.dtype) if self.dtype and tensor.is_floating_point() else tensor

    def arguments(self, rank):
        """Return the arguments of a rank, and the tensors that it must receive, by name."""
        given = dict(self.options)
        # A rank only passes patterns for the parameters that it sends or receives.
        shards = {}
        sent = [name for name in self.wholes if self.source.has(name, rank)]
        due = {name: self.due(name, rank) for name in self.wanted if self.target.has(name, rank)}
        if sent:
            given["state"] = {
                name: self.held(self.source, name, self.source.part(name, whole, rank), whole, rank)
                for name, whole in self.wholes.items()
                if name in sent
            }
            shards |= self.source.cuts
        if due:
            given["into"] = {
                name: self.held(self.target, name, torch.full_like(one, 3), self.wanted[name], rank)
                for name, one in due.items()
            }
            given["fused"] = self.fused
            for name, cuts in self.target.cuts.items():
                shards[name] = {**shards.get(name, {}), **cuts}
        return {**given, "shards": {**shards, "*": {}}}, due

    def held(self, end, name, part, whole, rank):
        """Return the tensor that a rank passes, of one of the kinds."""
        part = self.kinds[(rank + len(name) + part.numel()) % len(self.kinds)](part)
        if name not in end.placements:
            return part
        return self.distribute(part.detach(), whole, end, name, rank)

    def local(self, given, name):
        tensor = given["into"][name]
        return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


class Mesh:
    """Replaces a DeviceMesh."""


def without_group(part, whole, end, name, rank):
    """Return an object like a DTensor of a rank, without a process group."""
    coords = end.layout.coords(rank)
    mesh = Mesh()
    mesh.mesh = end.mesh()
    mesh.shape = tuple(end.sizes.values())
    mesh.get_coordinate = lambda: [coords[dim] for dim in end.sizes]
    mesh.get_group = lambda dim: SimpleNamespace(rank=lambda: mesh.get_coordinate()[dim])
    return SimpleNamespace(
        device_mesh=mesh,
        placements=tuple(end.placements[name]),
        shape=whole.shape,
        dtype=part.dtype,
        to_local=lambda: part,
    )
