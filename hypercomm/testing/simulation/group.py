"""Replaces a process group of a simulated rank: calls are recorded and return immediately."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from hypercomm.errors import SimulationError
from hypercomm.testing.simulation.records import Book, Collective, Creation, Step

Tensors = torch.Tensor | Sequence[torch.Tensor]

_NONE = pickle.dumps(None)


class SimulatedGroup:
    """Replaces a process group of the calling rank: it knows its members, and cannot communicate.

    Args:
        name: Its name.
        rank: The position of the calling rank among the members.
        size: The number of members.
        timeout: Its timeout.
        description: Its description.
    """

    bound_device_id = None
    _device_types = ()

    def __init__(
        self, name: str, rank: int, size: int, timeout: timedelta, description: str
    ) -> None:
        self.group_name = name
        self.group_desc = description
        self.options = SimpleNamespace(_timeout=timeout)
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        """Return the position of the calling rank among the members."""
        return self._rank

    def size(self) -> int:
        """Return the number of members."""
        return self._size

    def name(self) -> str:
        """Return the kind of backend."""
        return "simulated"

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """ProcessGroup, because torch checks for it."""
        return ProcessGroup

    def _get_backend(self, _device: object) -> SimulatedGroup:
        return self

    def __getattr__(self, name: str) -> Any:
        raise SimulationError(
            f"a simulated process group has no {name!r}: no rank is there to communicate with; "
            f"leave communication out of what is simulated, or start ranks with run_ranks()"
        )

    def __repr__(self) -> str:
        return f"<simulated group {self.group_name}: rank {self._rank} of {self._size}>"


class SimulatedWork(Work):
    """The work of simulated calls, which are always complete.

    Args:
        steps: The steps of the rank that made the calls.
        calls: The indices of the calls.
        results: The outputs.
        source: The sender, by its position in the group.
    """

    def __init__(
        self,
        steps: list[Step],
        calls: Sequence[int],
        results: Sequence[torch.Tensor] = (),
        source: int = 0,
    ) -> None:
        super().__init__()
        self._steps, self._calls = steps, calls
        self._results, self._source = list(results), source

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - torch's arguments
        """Record that the rank waits here."""
        self._steps.extend(self._calls)
        return True

    synchronize = wait  # type: ignore[assignment]

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def result(self) -> list[torch.Tensor]:
        """Return the outputs."""
        return self._results

    def get_future(self) -> Any:
        """Return a future that has the outputs."""
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future

    def source_rank(self) -> int:
        """Return the sender, by its position in the group."""
        return self._source

    _source_rank = source_rank


class RecordingGroup(SimulatedGroup):
    """Replaces a process group of a rank, with the methods that torch.distributed calls.

    Args:
        creation: The group; its name is the one that the members compare.
        rank: The rank in the job.
        book: Records the calls.
        name: The name that torch knows.
    """

    supports_coalescing = False

    def __init__(self, creation: Creation, rank: int, book: Book, name: str) -> None:
        ranks = creation.ranks
        description = "default_pg" if name == "0" else creation.description
        super().__init__(name, ranks.index(rank), len(ranks), creation.timeout, description)
        self._book, self._creation = book, creation
        self._first = 0

    # ---- the same on all members

    def allreduce(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        """Leave the tensors as they are."""
        return self._call("all_reduce", tensors, reduction=_reduction(opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        """Leave the tensors as they are."""
        return self._call("all_reduce_coalesced", tensors, reduction=_reduction(opts))

    def reduce(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        """Leave the tensors as they are."""
        return self._call("reduce", tensors, reduction=_reduction(opts), root=opts.rootRank)

    def barrier(self, opts: Any = None) -> SimulatedWork:  # noqa: ARG002 - torch's arguments
        """Record a barrier."""
        return self._call("barrier", ())

    def monitored_barrier(self, *_: object, **__: object) -> None:
        """Record a barrier."""
        self._call("monitored_barrier", ()).wait()

    def allgather(self, outputs: Any, inputs: Any, *_: object) -> SimulatedWork:
        """Put this rank's tensor into every slot."""
        (slots,), (own,) = outputs, inputs
        self._check_number("all_gather", slots)
        work = self._call("all_gather", _distinct(slots, own), results=slots)
        _fill(slots, own)
        return work

    def all_gather_single(self, output: Any, own: Any, *_: object) -> SimulatedWork:
        """Put this rank's tensor into every slot."""
        return self._gather_whole("all_gather_into_tensor", [output], [own])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *_: object) -> SimulatedWork:
        """Put this rank's tensors into every slot."""
        return self._gather_whole("all_gather_into_tensor_coalesced", outputs, inputs)

    def _gather_whole(self, op: str, outputs: Any, inputs: Any) -> SimulatedWork:
        work = self._call(op, inputs, results=outputs)
        for output, own in zip(outputs, inputs, strict=True):
            self._check_size(op, output, own)
            slots = own.detach().reshape(1, -1).expand(self._size, -1)
            output.detach().copy_(slots.reshape(output.shape))
        return work

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        """Give this rank its part of its tensors."""
        (parts,) = inputs
        self._check_number("reduce_scatter", parts)
        own, how = parts[self._rank], _reduction(opts)
        work = self._call("reduce_scatter", _distinct(parts, own), reduction=how, results=outputs)
        _fill(outputs, own)
        return work

    def reduce_scatter_single(self, output: Any, own: Any, opts: Any = None) -> SimulatedWork:
        """Give this rank its part of its tensor."""
        return self._scatter_whole("reduce_scatter_tensor", [output], [own], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> SimulatedWork:
        """Give this rank its part of its tensors."""
        return self._scatter_whole("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    def _scatter_whole(self, op: str, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        work = self._call(op, inputs, reduction=_reduction(opts), results=outputs)
        for output, own in zip(outputs, inputs, strict=True):
            self._check_size(op, own, output)
            part = own.detach().reshape(self._size, -1)[self._rank]
            output.detach().copy_(part.reshape(output.shape))
        return work

    # ---- from each to each

    def all_to_all_single(
        self, output: Any, own: Any, takes: Sequence[int], gives: Sequence[int], *_: object
    ) -> SimulatedWork:
        """Give this rank its own tensor, if the shapes are equal."""
        op = "all_to_all_single"
        sends, receives = self._splits(op, own, gives), self._splits(op, output, takes)
        shapes = [own.shape[1:]]
        work = self._call(op, own, shapes, sends=sends, receives=receives, results=[output])
        _fill([output], own)
        return work

    def alltoall(self, outputs: Any, inputs: Any, *_: object) -> SimulatedWork:
        """Give this rank its own tensors, if the shapes are equal."""
        for tensors in (outputs, inputs):
            self._check_number("all_to_all", tensors)
        sends = [tuple(tensor.shape) for tensor in inputs]
        receives = [tuple(tensor.shape) for tensor in outputs]
        work = self._call("all_to_all", inputs, [], sends=sends, receives=receives, results=outputs)
        for output, own in zip(outputs, inputs, strict=True):
            _fill([output], own)
        return work

    # ---- from one, or to one

    def broadcast(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        """Give this rank the root's values, if the root ran before."""
        own = _listed(tensors)
        work = self._call("broadcast", own, root=opts.rootRank)
        is_root, kinds = self._rank == opts.rootRank, ("broadcast", *map(_kind, own))
        kept = self._spread(is_root, kinds, lambda: [_copy(tensor) for tensor in own])
        if not is_root:
            self._take(own, kept)
        return work

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        """Give this rank its part of the root's values, if the root ran before."""
        work = self._call("scatter", outputs, root=opts.rootRank)
        is_root, parts = self._rank == opts.rootRank, inputs[0] if inputs else ()
        if is_root:
            self._check_number("scatter", parts)
        kinds = ("scatter", _kind(outputs[0]))
        kept = self._spread(is_root, kinds, lambda: [_copy(part) for part in parts])
        parts = parts if is_root else kept
        self._take(outputs, None if parts is None else [parts[self._rank]])
        return work

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        """Put the destination's own tensor into every slot."""
        work = self._call("gather", inputs, root=opts.rootRank, results=outputs)
        if outputs:
            self._check_number("gather", outputs[0])
            _fill(outputs[0], inputs[0])
        return work

    # ---- from one to one

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> SimulatedWork:
        """Keep the tensor for a rank that runs later."""
        (own,) = _listed(tensors)
        work = self._call("send", own, root=to, tag=tag)
        self._book.send(
            self._creation, self._creation.ranks[to], tag, _kind(own), lambda: _copy(own)
        )
        return work

    def recv(self, tensors: Tensors, source: int | None, tag: int = 0) -> SimulatedWork:
        """Give this rank the values sent to it, if the sender ran before."""
        own, ranks = _listed(tensors), self._creation.ranks
        work = self._call("recv", own, root=source, tag=tag)
        sender = None if source is None else ranks[source]
        found = self._book.receive(self._creation, sender, tag, _kind(own[0]))
        self._take(own, None if found is None or found[1] is None else [found[1]])
        work._source = (self._rank + 1) % self._size if found is None else ranks.index(found[0])
        return work

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> SimulatedWork:
        """Give this rank the first values sent to it, if any sender ran before."""
        return self.recv(tensors, None, tag)

    # ---- names of other releases of torch, and coalesced calls

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def get_backend(self, _device: object) -> RecordingGroup:
        """Return itself."""
        return self

    def _start_coalescing(self, _device: object) -> None:
        self._first = len(self._book.steps)

    def _end_coalescing(self, _device: object) -> SimulatedWork:
        steps = self._book.steps
        begun = range(self._first, len(steps))
        calls = [index for index in begun if isinstance(steps[index], Collective)]
        return SimulatedWork(steps, calls)

    # ---- what they share

    def _call(
        self,
        op: str,
        tensors: Tensors,
        shapes: Sequence[Sequence[int]] | None = None,
        *,
        reduction: str = "",
        root: int | None = None,
        sends: Sequence[Any] = (),
        receives: Sequence[Any] = (),
        tag: int = 0,
        results: Sequence[torch.Tensor] | None = None,
    ) -> SimulatedWork:
        given = _listed(tensors)
        if shapes is None:
            shapes = [tensor.shape for tensor in given]
        call = Collective(
            op,
            self._creation,
            tuple(tuple(map(int, shape)) for shape in shapes),
            str(given[0].dtype).removeprefix("torch.") if given else "",
            reduction,
            None if root is None else self._creation.ranks[root],
            tuple(sends),
            tuple(receives),
            tag,
        )
        index = self._book.call(call)
        return SimulatedWork(self._book.steps, [index], given if results is None else results)

    def _spread(self, is_root: bool, kind: Hashable, value: Callable[[], Any]) -> Any:
        return self._book.spread(self._creation, is_root, kind, value)

    def _take(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor] | None) -> None:
        """Fill tensors with received values; without any, objects are None."""
        for tensor, value in zip(tensors, values or (), strict=False):
            _fill([tensor], value)
        if values is None and self._book.has_objects:
            for tensor in tensors:
                is_sizes = tensor.dtype == torch.int64
                data = [len(_NONE)] * tensor.numel() if is_sizes else _NONE * tensor.numel()
                tensor.copy_(torch.tensor([*data[: tensor.numel()]], dtype=tensor.dtype))

    def _check_number(self, op: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self._size:
            raise SimulationError(
                f"{op} needs a list of {self._size} tensors, one for each member, "
                f"got {len(tensors)}"
            )

    def _check_size(self, op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if whole.numel() != self._size * part.numel():
            raise SimulationError(
                f"{op} needs {self._size * part.numel()} elements, {part.numel()} for each of "
                f"{self._size} members, got {whole.numel()}"
            )

    def _splits(self, op: str, tensor: torch.Tensor, splits: Sequence[int]) -> Sequence[int]:
        length = tensor.shape[0] if tensor.dim() else 0
        if not splits and length % self._size == 0:
            return [length // self._size] * self._size
        if len(splits) != self._size or sum(splits) != length:
            raise SimulationError(
                f"{op} needs {self._size} sizes, one for each member, with the sum {length}, "
                f"got {list(splits)}"
            )
        return splits


def _listed(tensors: Tensors) -> Sequence[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _distinct(parts: Sequence[torch.Tensor], own: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return one tensor if all have its shape, else all of them."""
    return [own] if {part.shape for part in parts} == {own.shape} else parts


def _kind(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.dtype


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _fill(slots: Sequence[torch.Tensor], own: torch.Tensor) -> None:
    """Put a tensor into those slots that it fits."""
    for slot in slots:
        if slot.shape == own.shape and slot is not own:
            slot.detach().copy_(own.detach())


def _reduction(opts: Any) -> str:
    """Return the reduction of the options of a collective, "sum" by default."""
    op = getattr(opts, "reduceOp", opts)
    return "sum" if op is None else str(getattr(op, "op", op)).rpartition(".")[2].lower()
