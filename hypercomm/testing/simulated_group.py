"""Process groups of a simulated rank. Calls are recorded and return immediately."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from hypercomm.blame.evidence import FROM_ANYBODY, LoggedCall
from hypercomm.errors import SimulationError
from hypercomm.testing.recording import Book, Collective, RecordedGroup, Step

Tensors = torch.Tensor | Sequence[torch.Tensor]

_NONE = pickle.dumps(None)


class SimulatedGroup:
    """A process group of the calling rank that has members but cannot communicate.

    Args:
        name: The name of the group.
        rank: The position of the calling rank among the members.
        size: The number of members.
        timeout: The timeout of the group.
        description: The description of the group.
    """

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
        """Return the kind of backend."""
        return "simulated"

    @property
    def _device_types(self) -> list[torch.device]:
        """The CPU, if the backend supports it. `monitored_barrier` reads this from torch 2.15 on.

        Accelerators are never included, because torch would move the bytes of objects to them.
        """
        parts = dist.get_backend_config(self).split(",")  # type: ignore[arg-type]
        return [torch.device("cpu")] if any(part.startswith("cpu:") for part in parts) else []

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """ProcessGroup, because torch checks the type."""
        return ProcessGroup

    def _get_backend(self, _device: object) -> SimulatedGroup:
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a simulated process group has no {name!r}, because there are no other ranks to "
            f"communicate with; omit the call, or start real ranks with run_ranks()"
        )

    def __repr__(self) -> str:
        return f"<simulated group {self.group_name}: rank {self._rank} of {self._size}>"


class SimulatedWork(Work):
    """The `Work` object of simulated calls. It is always complete.

    Args:
        steps: The steps of the rank that made the calls.
        calls: The calls.
        results: The output tensors of the calls.
    """

    def __init__(
        self, steps: list[Step], calls: Sequence[LoggedCall], results: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self._steps = steps
        self._calls = calls
        self._results = list(results)
        self.source = 0

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - torch's arguments
        """Record that the rank waits for the calls."""
        self._steps.extend((True, call) for call in self._calls)
        return True

    synchronize = wait  # type: ignore[assignment]

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> Any:
        """Return a completed future with the outputs as its value."""
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future

    def source_rank(self) -> int:
        """Return the position of the sender in the group."""
        return self.source

    _source_rank = source_rank


class RecordingGroup(SimulatedGroup):
    """A process group of a rank with the methods that torch.distributed calls.

    Args:
        creation: The record of the group. The record's name is equal on all members.
        rank: The rank in the job.
        book: The record of the rank's calls.
        name: The name of the group in torch.
    """

    supports_coalescing = False

    def __init__(self, creation: RecordedGroup, rank: int, book: Book, name: str) -> None:
        ranks = creation.ranks
        description = "default_pg" if name == "0" else creation.description
        super().__init__(name, ranks.index(rank), len(ranks), creation.timeout, description)
        self._book = book
        self._creation = creation
        self._first = 0

    # ---- collectives in which all members have the same role

    def allreduce(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        """Leave the tensors as they are."""
        return self._call("all_reduce", tensors, reduction=_reduction(opts))

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
        """Put this rank's tensors into every slot."""
        return self._all_gather("all_gather", outputs, inputs)

    def all_gather_single(self, output: Any, own: Any, *_: object) -> SimulatedWork:
        """Put this rank's tensor, or each of its tensors, into every slot."""
        return self._all_gather("all_gather_into_tensor", _listed(output), _listed(own))

    def _all_gather(self, op: str, outputs: Any, inputs: Any) -> SimulatedWork:
        slots, given = self._parts(op, outputs, inputs)
        work = self._call(op, given, results=outputs)
        for listed, own in zip(slots, inputs, strict=True):
            _fill(listed, own)
        return work

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        """Copy this rank's part of its inputs to its outputs."""
        return self._reduce_scatter("reduce_scatter", outputs, inputs, opts)

    def reduce_scatter_single(self, output: Any, own: Any, opts: Any = None) -> SimulatedWork:
        """Copy this rank's part of its input, or of each of its inputs, to the output."""
        return self._reduce_scatter("reduce_scatter_tensor", _listed(output), _listed(own), opts)

    def _reduce_scatter(self, op: str, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        slots, given = self._parts(op, inputs, outputs)
        work = self._call(op, given, results=outputs, reduction=_reduction(opts))
        for output, listed in zip(outputs, slots, strict=True):
            _fill([output], listed[self._rank])
        return work

    def _parts(self, op: str, wholes: Any, parts: Any) -> tuple[list[Any], list[torch.Tensor]]:
        """Return the slots of each full tensor, and the tensors to record.

        The part is recorded instead of the slots if all slots have the shape of the part.
        """
        slots = [self._slots(op, *pair) for pair in zip(wholes, parts, strict=True)]
        given: list[torch.Tensor] = []
        for listed, part in zip(slots, parts, strict=True):
            given += [part] if {slot.shape for slot in listed} == {part.shape} else listed
        return slots, given

    # ---- all-to-all

    def all_to_all_single(
        self, output: Any, own: Any, takes: Sequence[int], gives: Sequence[int], *_: object
    ) -> SimulatedWork:
        """Copy this rank's input to its output, if the shapes are equal."""
        for tensor, sizes in ((output, takes), (own, gives)):
            if len(tensor) != (sum(sizes) or len(tensor) // self._size * self._size):
                raise SimulationError(
                    f"all_to_all_single cannot split {len(tensor)} rows into {sizes}"
                )
        is_even = not takes and not gives
        work = self._call("all_to_all_single", own, [own.shape[not is_even :]], [output])
        _fill([output], own)
        return work

    def alltoall(self, outputs: Any, inputs: Any, *_: object) -> SimulatedWork:
        """Copy this rank's inputs to its outputs, if the shapes are equal."""
        for tensors in (inputs, outputs):
            self._slots("all_to_all", tensors)
        work = self._call("all_to_all", inputs, (), outputs)
        for output, own in zip(outputs, inputs, strict=True):
            _fill([output], own)
        return work

    # ---- collectives with a root

    def broadcast(self, tensors: Any, opts: Any) -> SimulatedWork:
        """Copy the root's values to the tensors, if the root ran before."""
        work = self._call("broadcast", tensors, root=opts.rootRank)
        if self._rank == opts.rootRank:
            self._post("", tensors)
        else:
            self._receive(tensors, self._take(""))
        return work

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        """Copy this rank's part of the root's values to the outputs, if the root ran before."""
        work = self._call("scatter", outputs, root=opts.rootRank)
        if self._rank == opts.rootRank:
            parts = self._slots("scatter", inputs[0])
            self._post("", parts)
        else:
            parts = self._take("")
        self._receive(outputs, parts and parts[self._rank : self._rank + 1])
        return work

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        """On the destination rank, put the rank's own tensor into every slot."""
        work = self._call("gather", inputs, results=outputs, root=opts.rootRank)
        if outputs:
            _fill(self._slots("gather", outputs[0]), inputs[0])
        return work

    # ---- send and receive

    def send(self, tensors: Any, to: int, tag: int = 0) -> SimulatedWork:
        """Store the tensor for a rank that runs later."""
        route = f"{self._rank}->{to} tag {tag}"
        work = self._call("send", tensors, root=to, channel=f"send {route}", tag=tag)
        self._post(route, tensors)
        return work

    def recv(self, tensors: Any, source: int, tag: int = 0) -> SimulatedWork:
        """Copy the sender's values to the tensors, if the sender ran before."""
        route = f"{source}->{self._rank} tag {tag}"
        work = self._call("recv", tensors, root=source, channel=f"recv {route}", tag=tag)
        self._receive(tensors, self._take(route))
        work.source = source
        return work

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SimulatedWork:
        """Leave the tensor as it is."""
        work = self._call("recv", tensors, channel=FROM_ANYBODY, tag=tag)
        self._receive(tensors, None)
        work.source = (self._rank + 1) % self._size
        return work

    # ---- other names of the same calls, and coalesced calls

    allreduce_coalesced = allreduce
    _allgather_base = allgather_into_tensor_coalesced = all_gather_single
    all_gather_single_coalesced = all_gather_single
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = reduce_scatter_single
    reduce_scatter_single_coalesced = reduce_scatter_single
    alltoall_base = all_to_all_single

    def get_backend(self, _device: object) -> RecordingGroup:
        """Return this group."""
        return self

    def _start_coalescing(self, _device: object) -> None:
        self._first = len(self._book.steps)

    def _end_coalescing(self, _device: object) -> SimulatedWork:
        steps = self._book.steps
        return SimulatedWork(steps, [call for waits, call in steps[self._first :] if not waits])

    # ---- helpers

    def _call(
        self,
        op: str,
        tensors: Tensors,
        shapes: Sequence[Sequence[int]] | None = None,
        results: Any = None,
        root: int | None = None,
        channel: str = "",
        **fields: Any,
    ) -> SimulatedWork:
        given = _listed(tensors)
        if shapes is None:
            shapes = [tensor.shape for tensor in given]
        numbers = tuple(tuple(map(int, shape)) for shape in shapes)
        dtype = str(given[0].dtype).removeprefix("torch.") if given else ""
        peer = None if root is None else self._creation.ranks[root]
        made = Collective(op, self._creation, numbers, dtype, peer=peer, **fields)
        call = self._book.call(made, channel)
        return SimulatedWork(self._book.steps, [call], given if results is None else results)

    def _slots(self, op: str, whole: Any, part: torch.Tensor | None = None) -> Sequence[Any]:
        """Return one slot for each member, from a list of slots or from a tensor of all slots."""
        if isinstance(whole, torch.Tensor) and part is not None:
            if whole.numel() == self._size * part.numel():
                return list(whole.detach().reshape(self._size, *part.shape))
            whole = [whole]
        if len(whole) != self._size:
            got = [list(tensor.shape) for tensor in whole]
            raise SimulationError(f"{op} needs one part for each of {self._size} ranks, got {got}")
        return list(whole)

    def _post(self, route: str, tensors: Sequence[torch.Tensor]) -> None:
        values = [tensor.detach().clone() for tensor in tensors]
        self._book.post((self._creation.name, route), values)

    def _take(self, route: str) -> Any:
        return self._book.take((self._creation.name, route))

    def _receive(
        self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor] | None
    ) -> None:
        """Fill tensors with received values. Without values, pickled objects become None."""
        kinds = [[(each.shape, each.dtype) for each in every] for every in (tensors, values or ())]
        if kinds[0] == kinds[1]:
            for tensor, value in zip(tensors, values or (), strict=True):
                tensor.detach().copy_(value)
        elif self._book.has_objects:
            for tensor in tensors:
                is_sizes = tensor.dtype == torch.int64
                data = [len(_NONE)] * tensor.numel() if is_sizes else _NONE * tensor.numel()
                tensor.copy_(torch.tensor([*data[: tensor.numel()]], dtype=tensor.dtype))


def _listed(tensors: Tensors) -> Sequence[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _fill(slots: Sequence[torch.Tensor], own: torch.Tensor) -> None:
    """Copy a tensor into the slots of the same shape."""
    for slot in slots:
        if slot.shape == own.shape and slot is not own:
            slot.detach().copy_(own.detach())


def _reduction(opts: Any) -> str:
    """Return the reduction of the options of a collective, "sum" by default."""
    op = getattr(opts, "reduceOp", opts)
    return "sum" if op is None else str(getattr(op, "op", op)).rpartition(".")[2].lower()
