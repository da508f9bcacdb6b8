"""The job of torch.distributed on one simulated rank. Its calls are recorded and return at once."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from hypercomm.blame.evidence import FROM_ANYBODY, LoggedCall
from hypercomm.errors import SimulationError
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.testing.recording import Book, Collective, RecordedGroup, Step

Tensors = torch.Tensor | Sequence[torch.Tensor]

_NONE = pickle.dumps(None)

_c10d: Any = dist.distributed_c10d
_TABLES = ["pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"]


class SimulatedJob(_c10d._World):  # type: ignore[misc]
    """The state of torch.distributed on one simulated rank.

    torch keeps the state of a job in a global object of its class `_World`. Within `replaced_job`,
    a `SimulatedJob` takes the place of that object.

    Args:
        rank: The rank.
        ranks: A dict that maps each rank of the job to itself.
        backend: The backend of WORLD.
        timeout: The timeout of WORLD.
        book: The record of the rank's groups and calls.
    """

    is_patched = True
    default_pg: Any = None
    group_count = 0
    # In torch's class, these are properties with global state. Plain attributes replace them.
    pg_map = pg_names = pg_group_ranks = pg_backend_config = tags_to_pg = pg_to_tag = default_pg

    def __init__(
        self, rank: int, ranks: Mapping[int, int], backend: str, timeout: timedelta, book: Book
    ) -> None:
        super().__init__()
        self._rank = rank
        self._ranks = ranks
        self._backend = backend
        self._timeout = timeout
        self._book = book
        self._jobs = 0
        for table in _TABLES:
            setattr(self, table, {})

    def show(self) -> None:
        """Make this the current job of torch.distributed, within a `replaced_job` block."""
        _c10d._world = self

    def begin(self, backend: str | None = None, *_: object, **__: object) -> None:
        """Replace `torch.distributed.init_process_group`."""
        if self.default_pg is None:
            self._jobs += 1
            name = "WORLD" if self._jobs == 1 else f"WORLD (job {self._jobs})"
            everyone = range(len(self._ranks))
            whole = RecordedGroup(name, everyone, self._backend, self._timeout, name)
            self.default_pg = SimulatedGroup(whole, self._rank, self._book, "0")
            self.group_count = 1  # torch counts WORLD as group 0
        self._register(self.default_pg, "0", str(backend or self._backend), self._ranks)

    def end(self, group: Any = None) -> None:
        """Replace `torch.distributed.destroy_process_group`."""
        is_whole = group is None or group is self.default_pg
        for known in list(self.pg_map) if is_whole else [group]:
            self.tags_to_pg.pop(self.pg_to_tag.get(known), None)
            for table in _TABLES:
                getattr(self, table).pop(known, None)
        if is_whole:
            self.default_pg = None
            self.group_count = 0

    def group_named(self, name: str) -> Any:
        """Return the group with a name."""
        return next(group for group, known in self.pg_names.items() if known == name)

    def _register(self, group: Any, name: str, backend: str, ranks: Mapping[int, int]) -> None:
        self.pg_map[group] = (backend, None)
        self.pg_names[group] = name
        self.pg_group_ranks[group] = ranks
        self.pg_backend_config[group] = torchdist.backend_config(backend)
        self.pg_to_tag[group] = f"ptd:{name}"
        self.tags_to_pg[f"ptd:{name}"] = [group]

    def new_group(self, *args: Any, **options: Any) -> tuple[Any, None]:
        """Create one group, with the arguments of torch's `_new_process_group_helper`.

        Raises:
            ValueError: The name is taken.
        """
        _, position, ranks, backend, *more = args
        name = options["group_name"] if "group_name" in options else more[1]
        if name in self.pg_names.values():
            raise ValueError(f"the group name {name} is taken")
        if position is None:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        members, positions = _members(tuple(ranks))
        # torch restarts its count of groups in each job, so names repeat in a second job.
        unique = name if self._jobs == 1 else f"{name} (job {self._jobs})"
        timeout = options.get("timeout", timedelta(0))
        description = options.get("group_desc") or "undefined"
        made = RecordedGroup(unique, members, str(backend), timeout, description)
        self._book.create(made)
        group = SimulatedGroup(made, self._rank, self._book, unique)
        self._register(group, name, str(backend), positions)
        return group, None


@functools.cache
def _members(ranks: tuple[int, ...]) -> tuple[tuple[int, ...], dict[int, int]]:
    """Return the members and their positions. The result is cached, so simulated ranks share it."""
    return ranks, {rank: position for position, rank in enumerate(ranks)}


def _of_job(method: str) -> Callable[..., Any]:
    """Return a function that calls a method of the current job."""

    def call(*args: Any, **named: Any) -> Any:
        return getattr(_c10d._world, method)(*args, **named)

    return call


@contextlib.contextmanager
def replaced_job() -> Iterator[None]:
    """Replace the job of torch.distributed within a `with` block by the simulated job on show."""
    replaced: dict[str, object] = {
        "_world": _c10d._world,
        "_new_process_group_helper": _of_job("new_group"),
        "_store_based_barrier": lambda *_, **__: None,
        # torch's function warns about backends that are not built.
        "_get_default_timeout": torchdist.default_timeout,
        "init_process_group": _of_job("begin"),
        "destroy_process_group": _of_job("end"),
        "_resolve_process_group": _of_job("group_named"),
        "_get_msg_dict": lambda *_, **__: {},  # torch's logger would need NCCL's version
    }
    meshes = importlib.import_module("torch.distributed.device_mesh")
    with contextlib.ExitStack() as stack:
        stack.callback(_members.cache_clear)
        for module in (_c10d, dist, dist.c10d_logger, meshes):
            for name, value in replaced.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        yield


class SimulatedGroup:
    """A process group of a simulated rank, with the methods that torch.distributed calls.

    Args:
        creation: The record of the group. The record's name is equal on all members.
        rank: The rank in the job.
        book: The record of the rank's calls.
        name: The name of the group in torch.
    """

    bound_device_id = None
    supports_coalescing = False

    def __init__(self, creation: RecordedGroup, rank: int, book: Book, name: str) -> None:
        self.group_name = name
        self.group_desc = "default_pg" if name == "0" else creation.description
        self.options = SimpleNamespace(_timeout=creation.timeout)
        self._rank = creation.ranks.index(rank)
        self._size = len(creation.ranks)
        self._book = book
        self._creation = creation
        self._first = 0

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

    def get_backend(self, _device: object) -> SimulatedGroup:
        """Return this group."""
        return self

    _get_backend = get_backend

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a simulated process group has no {name!r}, because there are no other ranks to "
            f"communicate with; omit the call, or start real ranks with run_ranks()"
        )

    def __repr__(self) -> str:
        return f"<simulated group {self.group_name}: rank {self._rank} of {self._size}>"

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
