"""Replacements for barriers and object collectives, which need a real process group."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, cast

import torch.distributed as dist

from hypercomm.errors import SimulationError
from hypercomm.testing.simulation.group import RecordingGroup, SimulatedWork


def _mine(group: Any) -> RecordingGroup | None:
    """Return the group of this rank, by default WORLD; None if this rank is no member."""
    if dist.get_rank(group) < 0:
        return None
    found: Any = dist.group.WORLD if group is None else group
    return cast("RecordingGroup", found)


def _position(group: RecordingGroup, rank: int | None, position: int | None) -> int | None:
    """Return the position of a rank, which is given as one of the job or by its position."""
    return group.ranks.index(rank) if position is None and rank is not None else position


def _root(group: RecordingGroup, rank: int | None, position: int | None) -> int:
    found = _position(group, 0 if rank is None else rank, position)
    return 0 if found is None else found


def _copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - what this process wrote


def _barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: object = None,  # noqa: ARG001 - the arguments are torch's
    timeout: timedelta | None = None,  # noqa: ARG001
) -> SimulatedWork | None:
    if (here := _mine(group)) is None:
        return None
    work = here.barrier()
    if not async_op:
        work.wait()
        return None
    return work


def _monitored_barrier(
    group: Any = None,
    timeout: object = None,  # noqa: ARG001
    wait_all_ranks: bool = False,  # noqa: ARG001
) -> None:
    if (here := _mine(group)) is not None:
        here.barrier_of("monitored_barrier").wait()


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None, **_: Any) -> None:
    if (here := _mine(group)) is not None:
        here.call_on_objects("all_gather_object").wait()
        object_list[: here.size()] = [_copied(obj)] * here.size()


def _gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    **_: Any,
) -> None:
    if (here := _mine(group)) is None:
        return
    root = _root(here, dst, group_dst)
    here.call_on_objects("gather_object", root=root).wait()
    if here.rank() == root and object_gather_list is not None:
        object_gather_list[: here.size()] = [_copied(obj)] * here.size()


def _broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: object = None,  # noqa: ARG001
    group_src: int | None = None,
    **_: Any,
) -> None:
    if (here := _mine(group)) is None:
        return
    op, root, count = "broadcast_object_list", _root(here, src, group_src), len(object_list)
    here.call_on_objects(op, count, root).wait()
    kept = here.spread_objects(root, f"{op} {count}", lambda: pickle.dumps(list(object_list)))
    if kept is not None:
        object_list[:] = pickle.loads(kept)  # noqa: S301 - what this process wrote


def _scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
    **_: Any,
) -> None:
    if (here := _mine(group)) is None:
        return
    op, root = "scatter_object_list", _root(here, src, group_src)
    here.call_on_objects(op, root=root).wait()
    own = list(scatter_object_input_list or ())
    kept = here.spread_objects(root, op, lambda: pickle.dumps(own))
    if here.rank() == root:
        scatter_object_output_list[0] = _copied(own[root])
    elif kept is not None:
        scatter_object_output_list[0] = pickle.loads(kept)[here.rank()]  # noqa: S301


def _send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: Any = None,
    device: object = None,  # noqa: ARG001
    group_dst: int | None = None,
    **_: Any,
) -> None:
    if (here := _mine(group)) is not None:
        to = _root(here, dst, group_dst)
        here.send_objects(to, len(object_list), pickle.dumps(list(object_list)))


def _recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: object = None,  # noqa: ARG001
    group_src: int | None = None,
    **_: Any,
) -> int:
    if (here := _mine(group)) is None:
        return -1
    sender, kept = here.receive_objects(_position(here, src, group_src), len(object_list))
    if kept is not None:
        object_list[:] = pickle.loads(kept)  # noqa: S301
    return sender


def _refuse(*_: object, **__: object) -> NoReturn:
    raise SimulationError(
        "a collective of objects was called by a name that was imported before simulate(); call "
        "it as an attribute of torch.distributed there, such as dist.all_gather_object()"
    )


def _object_device(group: object = None) -> str:  # noqa: ARG001
    caller = inspect.currentframe()
    caller = caller and caller.f_back
    if caller is not None and "object" in caller.f_code.co_name:
        _refuse()
    return "cpu"


FUNCTIONS: Mapping[str, object] = {
    "barrier": _barrier,
    "monitored_barrier": _monitored_barrier,
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "scatter_object_list": _scatter_object_list,
    "send_object_list": _send_object_list,
    "recv_object_list": _recv_object_list,
    "_object_to_tensor": _refuse,
    "_get_object_coll_device": _object_device,
}
"""Replacements for functions of torch.distributed while a rank runs, by name."""
