"""A fake of NCCL that needs no GPU, and records the calls that reach it.

torch's own code creates the groups, with a backend from this module in place of NCCL.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import Backend, HashStore, PrefixStore, ProcessGroup, ProcessGroupGloo

c10d = dist.distributed_c10d

IS_PLUGIN = hasattr(Backend, "_ensure_backend_registered")
"""Since 2.14 torch's own backends are plugins. Earlier releases use NCCL's class by name."""

DEVICES = 64
"""The number of GPUs that torch finds while calls are recorded."""


class Call(NamedTuple):
    """A call that reached the fake."""

    what: str
    """The kind of call: "create", "connect", "no color" (a rank outside the new group takes part in
    a split), "split" (split_group, on any rank), "abort", "shutdown", or "group start" and "group
    end" (before torch 2.14, when WORLD is aborted)."""
    ranks: tuple[int, ...]
    """The global ranks of the group. For "no color", the ranks of the group that is split."""
    splits: bool = False
    """Whether the group is split off another group."""
    bound_to: torch.device | None = None
    """The device that the group is bound to. Unknown for "create" before torch 2.14."""
    options: Any = None
    """The given options. Before 2.14, torch creates default options if none are given."""
    timeout: timedelta | None = None
    name: str = ""


class NcclOptions:
    """Replaces ProcessGroupNCCL.Options, which this torch may lack."""

    if torch.torch_version.TorchVersion(torch.__version__) >= "2.15":
        lazy_init = False

    def __init__(self, is_high_priority_stream: bool = False):
        self._timeout = timedelta(minutes=10)
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()
        self.split_from = None


class FakeNccl:
    """A backend that replaces NCCL."""

    Options = NcclOptions
    supports_coalescing = False

    def __init__(self, recorder: "Recorder", place: tuple, call: Call, parent: "FakeNccl | None"):
        recorder.calls.append(call)
        recorder.kept.append(self)  # torch keeps only the C++ part of the object
        self.recorder = recorder
        self.ranks = call.ranks
        self.own_options = NcclOptions() if call.options is None else call.options
        self.own_options._timeout = call.timeout
        if parent is not None:
            parent.wait_for_members()
        self.begin(*place, call.timeout)

    @property
    def supports_splitting(self) -> bool:
        # torch documents that a group with lazy_init cannot be split until its first operation.
        return not getattr(self.own_options, "lazy_init", False)

    @property
    def options(self) -> Any:
        return self.own_options

    def record(self, what: str, *others: Any) -> None:
        self.recorder.calls.append(Call(what, self.ranks, *others))

    def perform_nocolor_split(self, device: torch.device) -> None:
        self.record("no color", False, device)
        self.wait_for_members()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.record("connect", False, device)

    def comm_split_count(self) -> int:
        return sum(call.splits for call in self.recorder.calls)


class Connected(FakeNccl, ProcessGroupGloo):
    """A fake whose members connect and communicate through gloo."""

    def begin(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        ProcessGroupGloo.__init__(self, store, rank, size, timeout=timeout)

    def wait_for_members(self) -> None:
        """Wait for all members, as a split does."""
        self.allreduce([torch.zeros(1)]).wait()


class Alone(FakeNccl, torch._C._distributed_c10d.Backend if IS_PLUGIN else ProcessGroupGloo):
    """A fake that does not wait for other members, and cannot communicate."""

    def begin(self, _store: Any, rank: int, size: int, _timeout: timedelta) -> None:
        if IS_PLUGIN:
            super(FakeNccl, self).__init__(rank, size)
        else:  # only a C++ class can be a backend, so this is a gloo group with an arbitrary size
            super(FakeNccl, self).__init__(HashStore(), 0, 1)

    def wait_for_members(self) -> None:
        pass

    def getBackendName(self) -> str:  # noqa: N802 - this is what C++ calls
        return "nccl"


class Recorder(NamedTuple):
    """The state that the fakes of one recording share."""

    communicates: bool
    calls: list[Call]
    kept: list[FakeNccl]

    @property
    def kind(self) -> type[FakeNccl]:
        return Connected if self.communicates else Alone

    def create(self, opts: Any, options: Any) -> FakeNccl:
        """Create a backend, as the creator function of a plugin does."""
        group, parent = opts.process_group, opts.split_from
        ranks = tuple(opts.global_ranks_in_group or range(opts.group_size))
        how = (parent is not None, group.bound_device_id, options, opts.timeout, opts.group_id)
        place = (opts.store, opts.group_rank, opts.group_size)
        return self.kind(self, place, Call("create", ranks, *how), parent)

    def as_class(self) -> type[FakeNccl]:
        """Return a class to replace ProcessGroupNCCL."""
        recorder = self

        class Named(self.kind):
            def __init__(self, store: Any, rank: int, size: int, options: Any):
                ranks = tuple(options.global_ranks_in_group or range(size))
                how = (options.split_from is not None, None, options, options._timeout)
                call = Call("create", ranks, *how, options.group_name)
                super().__init__(recorder, (store, rank, size), call, options.split_from)

            def _group_start(self) -> None:
                self.record("group start")

            def _group_end(self) -> None:
                self.record("group end")

        return Named

    def recording(self, method: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of ProcessGroup that records calls on groups with a fake."""

        def replacement(group: ProcessGroup, *args: Any, **named: Any) -> Any:
            part = part_of(group)
            if part is None:
                return real(group, *args, **named)
            if method == "split_group":
                return self.split_group(group, part, *args, **named)
            part.record(method)
            return real(group)

        return replacement

    def split_group(
        self, group: ProcessGroup, parent: FakeNccl, ranks: list[int], **given: Any
    ) -> ProcessGroup | None:
        """Do what the C++ part of `dist.split_group` does."""
        name, timeout = given["group_name"], given["timeout"]
        members = tuple(parent.ranks[rank] for rank in ranks)
        call = Call("split", members, True, group.bound_device_id, given["opts"], timeout, name)
        if group.rank() not in ranks:
            self.calls.append(call)
            parent.wait_for_members()
            return None
        store = PrefixStore(f"{name}/", group.get_group_store())
        rank = ranks.index(group.rank())
        size = len(ranks)
        kind = Backend.backend_type_map["nccl"]
        child = ProcessGroup(store, rank, size)
        child._set_default_backend(kind)
        for device in given.get("device_types") or group._device_types:
            if isinstance(group._get_backend(device), FakeNccl):
                part = self.kind(self, (store, rank, size), call, parent)
                child._register_backend(device, kind, part)
            elif self.communicates:
                part = ProcessGroupGloo(PrefixStore(f"{device}/", store), rank, size, timeout)
                child._register_backend(device, ProcessGroup.BackendType.GLOO, part)
        child._set_group_name(name)
        child._set_group_desc(given["group_desc"] or "undefined")
        return child


def part_of(group: ProcessGroup) -> FakeNccl | None:
    """Return the fake backend of a group, or None if all its backends are real, such as gloo."""
    parts = (group._get_backend(device) for device in group._device_types)
    return next((part for part in parts if isinstance(part, FakeNccl)), None)


@contextlib.contextmanager
def recorded_nccl(*, communicates: bool = False) -> Iterator[list[Call]]:
    """Replace NCCL by a fake during a `with` block. Destroy WORLD before the block ends.

    Args:
        communicates: Whether groups connect through gloo, and a split waits for all ranks of its
            parent. Otherwise a process is alone in a world of any size, and nothing waits.

    Yields:
        The calls so far.
    """
    recorder = Recorder(communicates, [], [])
    with contextlib.ExitStack() as stack:
        stack.callback(recorder.kept.clear)

        def patch(target: Any, attribute: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, attribute, value, create=True))

        patch(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
        patch(torch.accelerator, "is_available", lambda: True)
        patch(torch.accelerator, "device_count", lambda: DEVICES)
        patch(torch.cuda, "device_count", lambda: DEVICES)
        patch(torch.cuda, "current_device", lambda: int(os.environ.get("LOCAL_RANK", "0")))
        patch(torch.cuda.nccl, "version", lambda: (2, 0))  # torch logs it
        patch(c10d, "default_pg_nccl_timeout", timedelta(minutes=10))
        for module in (c10d, dist):
            patch(module, "is_nccl_available", lambda: True)
            if not (IS_PLUGIN and hasattr(module, "ProcessGroupNCCL")):
                patch(module, "ProcessGroupNCCL", recorder.as_class())
        if IS_PLUGIN:
            Backend._ensure_backend_registered("nccl")  # with torch's devices and type
            plugin = Backend._BackendPlugin(recorder.create, extended_api=True)
            stack.enter_context(mock.patch.dict(Backend._plugins, {"NCCL": plugin}))
        for method in {"abort", "shutdown", "split_group"} & set(dir(ProcessGroup)):
            patch(ProcessGroup, method, recorder.recording(method, getattr(ProcessGroup, method)))
        yield recorder.calls


@contextlib.contextmanager
def lone_world(backend: str, world_size: int, rank: int = 0, **options: Any) -> Iterator[None]:
    """Make this the only process of a world of any size. Pass `options` to `init_process_group`."""
    store = HashStore()
    dist.init_process_group(backend, store=store, world_size=world_size, rank=rank, **options)
    try:
        with mock.patch("hypercomm.process_groups.torch_internals.has_ranks", return_value=False):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
