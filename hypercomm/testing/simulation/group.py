"""Stands for a process group of a simulated rank: calls are recorded and return immediately."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from hypercomm.errors import SimulationError
from hypercomm.testing.simulation.records import OBJECTS, Book, Creation

Tensors = torch.Tensor | Sequence[torch.Tensor]
Splits = tuple[Sequence[Any], Sequence[Any]]


class SimulatedGroup:
    """Stands in for a process group of the calling rank: knows all but how to communicate."""

    bound_device_id = None

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
        """Return what kind of backend this is."""
        return "simulated"

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """ProcessGroup, because DeviceMesh checks for it."""
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
    """The work of a simulated collective, which is always complete."""

    def __init__(
        self, book: Book, index: int, results: Sequence[torch.Tensor], source: int = 0
    ) -> None:
        super().__init__()
        self._book, self._steps, self._index = book, book.steps, index
        self._results = list(results)
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - torch's arguments
        """Record that the rank waits here."""
        self._book.wait(self._steps, self._index)
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
        """Return who sent, by its position in the group."""
        return self._source

    _source_rank = source_rank


class RecordingGroup(SimulatedGroup):
    """Stands in for a process group of a rank, with the methods that torch.distributed calls.

    Args:
        creation: The group; its name is what the members know it by.
        rank: The rank of the job whose group this is.
        book: Records its calls.
        name: The name that torch knows.
    """

    supports_coalescing = False

    def __init__(self, creation: Creation, rank: int, book: Book, name: str) -> None:
        ranks = creation.ranks
        description = "default_pg" if name == "0" else creation.description
        super().__init__(name, ranks.index(rank), len(ranks), creation.timeout, description)
        self.ranks = ranks
        self._book, self._creation = book, creation

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
        return self.barrier_of("barrier")

    def barrier_of(self, op: str) -> SimulatedWork:
        """Record a barrier of any name."""
        return self._call(op, ())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:  # noqa: ARG002
        """Put this rank's tensor in every slot."""
        (outputs,), (own,) = outputs, inputs
        self._check_number("all_gather", outputs)
        work = self._call("all_gather", _alike(outputs, own), results=outputs)
        _fill(outputs, own)
        return work

    def all_gather_single(self, output: Any, own: Any, opts: Any = None) -> SimulatedWork:  # noqa: ARG002
        """Put this rank's tensor in every slot."""
        self._check_size("all_gather_into_tensor", output, own)
        work = self._call("all_gather_into_tensor", own, results=[output])
        self._fill_whole(output, own)
        return work

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,  # noqa: ARG002
    ) -> SimulatedWork:
        """Put this rank's tensors in every slot."""
        work = self._call("all_gather_into_tensor_coalesced", inputs, results=outputs)
        for output, own in zip(outputs, inputs, strict=True):
            self._check_size("all_gather_into_tensor", output, own)
            self._fill_whole(output, own)
        return work

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        """Give this rank its part of its tensors."""
        (parts,) = inputs
        self._check_number("reduce_scatter", parts)
        given = _alike(parts, parts[self._rank])
        work = self._call("reduce_scatter", given, reduction=_reduction(opts), results=outputs)
        _fill(outputs, parts[self._rank])
        return work

    def reduce_scatter_single(self, output: Any, own: Any, opts: Any = None) -> SimulatedWork:
        """Give this rank its part of its tensor."""
        how = _reduction(opts)
        self._check_size("reduce_scatter_tensor", own, output)
        work = self._call("reduce_scatter_tensor", own, reduction=how, results=[output])
        self._take_part(output, own)
        return work

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> SimulatedWork:
        """Give this rank its part of its tensors."""
        how = _reduction(opts)
        work = self._call("reduce_scatter_tensor_coalesced", inputs, reduction=how, results=outputs)
        for output, own in zip(outputs, inputs, strict=True):
            self._check_size("reduce_scatter_tensor", own, output)
            self._take_part(output, own)
        return work

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- from each to each

    def all_to_all_single(
        self, output: Any, own: Any, takes: Sequence[int], gives: Sequence[int], _opts: Any = None
    ) -> SimulatedWork:
        """Give this rank its own tensor, where that fits."""
        op = "all_to_all_single"
        splits = self._splits(op, own, gives), self._splits(op, output, takes)
        work = self._call(op, own, shapes=(own.shape[1:],), splits=splits, results=[output])
        _fill([output], own)
        return work

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:  # noqa: ARG002
        """Give this rank its own tensors, where those fit."""
        for tensors in (outputs, inputs):
            self._check_number("all_to_all", tensors)
        splits = [tensor.shape for tensor in inputs], [tensor.shape for tensor in outputs]
        work = self._call("all_to_all", inputs, shapes=(), splits=splits, results=outputs)
        for output, own in zip(outputs, inputs, strict=True):
            _fill([output], own)
        return work

    # ---- from one, or to one

    def broadcast(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        """Give this rank what the root had, if that ran before."""
        work = self._call("broadcast", tensors, root=opts.rootRank)
        own = _listed(tensors)
        kinds = ("broadcast", *map(_kind, own))
        kept = self._spread(opts.rootRank, kinds, lambda: [_copy(tensor) for tensor in own])
        for tensor, value in zip(own, kept or (), strict=False):
            _fill([tensor], value)
        return work

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        """Give this rank its part of what the root had, if that ran before."""
        (output,) = outputs
        work = self._call("scatter", outputs, root=opts.rootRank)
        if self._rank == opts.rootRank:
            self._check_number("scatter", inputs[0])
        kinds = ("scatter", _kind(output))
        kept = self._spread(opts.rootRank, kinds, lambda: [_copy(part) for part in inputs[0]])
        parts = inputs[0] if self._rank == opts.rootRank else kept
        if parts is not None:
            _fill([output], parts[self._rank])
        return work

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        """Put the destination's own tensor in every slot."""
        work = self._call("gather", inputs, root=opts.rootRank, results=outputs)
        if outputs:
            self._check_number("gather", outputs[0])
            _fill(outputs[0], inputs[0])
        return work

    # ---- from one to one

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> SimulatedWork:
        """Keep the tensor for a rank that runs later."""
        (tensor,) = _listed(tensors)
        self._post(to, tag, _kind(tensor), lambda: _copy(tensor))
        return self._call("send", tensor, root=to, tag=tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> SimulatedWork:
        """Give this rank what was sent to it, if the sender ran before."""
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> SimulatedWork:
        """Give this rank the first that was sent to it, if any sender ran before."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> SimulatedWork:
        (tensor,) = _listed(tensors)
        found = self._get(source, tag, _kind(tensor))
        if found is not None and found[1] is not None:
            _fill([tensor], found[1])
        sender = (self._rank + 1) % self._size if found is None else self.ranks.index(found[0])
        return self._call("recv", tensor, root=source, tag=tag, source=sender)

    # ---- coalesced calls, and objects

    def _start_coalescing(self, _device: object) -> None:
        pass

    def _end_coalescing(self, _device: object) -> SimulatedWork:
        return SimulatedWork(self._book, len(self._book.steps) - 1, [])

    def get_backend(self, _device: object) -> RecordingGroup:
        """Return itself."""
        return self

    def call_on_objects(self, op: str, count: int = 0, root: int | None = None) -> SimulatedWork:
        """Record a collective of pickled objects."""
        shapes = ((count,),) if count else ()
        return self._call(op, (), shapes=shapes, dtype=OBJECTS, root=root)

    def spread_objects(self, root: int, op: str, value: Callable[[], bytes]) -> bytes | None:
        """Return what the root had, if that ran before."""
        kept: bytes | None = self._spread(root, op, value)
        return kept

    def send_objects(self, to: int, count: int, value: bytes) -> None:
        """Keep objects for a rank that runs later."""
        self._post(to, 0, count, lambda: value)
        self._object_message("send_object_list", to, count)

    def receive_objects(self, source: int | None, count: int) -> tuple[int, bytes | None]:
        """Return a sender's rank, and its objects if it ran before."""
        found = self._get(source, 0, count)
        self._object_message("recv_object_list", source, count)
        if found is None:
            return self.ranks[(self._rank + 1) % self._size if source is None else source], None
        return found

    def _object_message(self, op: str, peer: int | None, count: int) -> None:
        shapes = ((count,),)
        self._call(op, (), shapes=shapes, dtype=OBJECTS, root=peer).wait()

    # ---- what they share

    def _call(
        self,
        op: str,
        tensors: Tensors,
        *,
        shapes: tuple[Any, ...] | None = None,
        dtype: str = "",
        reduction: str = "",
        root: int | None = None,
        splits: Splits | None = None,
        tag: int = 0,
        results: Sequence[torch.Tensor] | None = None,
        source: int = 0,
    ) -> SimulatedWork:
        given = _listed(tensors)
        if shapes is None:
            shapes = tuple(tensor.shape for tensor in given)
        dtype = str(given[0].dtype).removeprefix("torch.") if given else dtype
        index = self._book.call(
            op,
            self._creation,
            tuple(tuple(map(int, shape)) for shape in shapes),
            dtype,
            reduction,
            None if root is None else self.ranks[root],
            *((None, None) if splits is None else map(tuple, splits)),
            tag,
        )
        return SimulatedWork(self._book, index, given if results is None else results, source)

    def _spread(self, root: int, kind: Hashable, value: Callable[[], Any]) -> Any:
        return self._book.spread(self._creation, self._rank == root, kind, value)

    def _post(self, to: int, tag: int, kind: Hashable, value: Callable[[], Any]) -> None:
        self._book.send(self._creation, self.ranks[to], tag, kind, value)

    def _get(self, source: int | None, tag: int, kind: Hashable) -> tuple[int, Any] | None:
        sender = None if source is None else self.ranks[source]
        return self._book.receive(self._creation, sender, tag, kind)

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

    def _splits(self, op: str, tensor: torch.Tensor, splits: Sequence[int]) -> tuple[int, ...]:
        length = tensor.shape[0] if tensor.dim() else 0
        if not splits and length % self._size == 0:
            return (length // self._size,) * self._size
        if len(splits) != self._size or sum(splits) != length:
            raise SimulationError(
                f"{op} needs {self._size} sizes, one for each member, with the sum {length}, "
                f"got {list(splits)}"
            )
        return tuple(splits)

    def _fill_whole(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        flat = part.detach().reshape(1, -1).expand(self._size, -1)
        whole.detach().copy_(flat.reshape(whole.shape))

    def _take_part(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        parts = whole.detach().reshape(self._size, -1)
        part.detach().copy_(parts[self._rank].reshape(part.shape))


def _listed(tensors: Tensors) -> Sequence[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _alike(parts: Sequence[torch.Tensor], own: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return one tensor if all have its shape, else all of them."""
    return [own] if {part.shape for part in parts} == {own.shape} else parts


def _kind(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.dtype


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _fill(slots: Sequence[torch.Tensor], own: torch.Tensor) -> None:
    """Put a tensor into those slots that it fits."""
    own = own.detach()
    for slot in slots:
        if slot.shape == own.shape and slot is not own:
            slot.detach().copy_(own)


_REDUCTIONS: dict[object, str] = {None: "sum"}


def _reduction(opts: Any) -> str:
    given = getattr(opts, "reduceOp", opts)
    op = getattr(given, "op", given)
    name = _REDUCTIONS.get(op)
    if name is None:
        name = _REDUCTIONS[op] = str(op).rpartition(".")[2].lower()
    return name
