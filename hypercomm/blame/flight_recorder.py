"""What torch's flight recorder wrote: the dumps of NCCL's watchdog, as pickle or JSON.

The fields are those that torch's own reader takes, `torch/distributed/flight_recorder/components`
in torch 2.15, and those that torch 2.6, 2.13 and 2.15 were seen to write.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from hypercomm.blame.records import FINISHED, WORLD, Call, GroupId, RankRecord

_STATES = {"completed": FINISHED, "started": "started", "scheduled": "queued"}
_OPS = {
    "_all_gather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
_PEERS = re.compile(r"(send|recv) (\d+)(->|<-)(\d+)")
_DEFAULT = "default_pg"
"""What torch calls the group of all ranks in dumps."""
_OF_TORCH = re.compile(
    r"[/\\]torch[/\\](distributed|utils|nn|autograd|_\w+)[/\\]|typing_extensions\.py$|"
    r"contextlib\.py$|[/\\]hypercomm[/\\](grid|grid_set|process_groups|transfers|training)[/\\]"
)


class _OnlyValues(pickle.Unpickler):
    """Reads numbers, texts and lists of them: a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(
            f"it wants to load {module}.{name}, which a dump has no need of: it was not read, "
            f"as it could run any code"
        )

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to {pid!r}, outside of itself")


def unpickle(content: bytes) -> object:
    """Read a pickle that holds nothing but values; runs none of its code.

    Raises:
        pickle.UnpicklingError, EOFError, ValueError: It holds more, or is cut off.

    Example:
        >>> import os, pickle
        >>> unpickle(pickle.dumps({"version": "2.10"}))
        {'version': '2.10'}
        >>> unpickle(pickle.dumps(os.getcwd))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        _pickle.UnpicklingError: it wants to load posix.getcwd, which a dump has no need of: ...
    """
    return _OnlyValues(io.BytesIO(content)).load()


def read(found: Mapping[str, Any], rank: int, file: str) -> RankRecord:
    """Read the dump of one rank.

    Args:
        found: What the pickle, or the JSON, holds.
        rank: Whose it is, as its name says.
        file: Its name.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: It has another form.
    """
    record = RankRecord(rank, file, "flight recorder", versions={"recorder": str(found["version"])})
    groups: dict[str, GroupId] = {}
    for uid, config in found["pg_config"].items():
        name = str(config.get("name") or uid)
        if name:  # gloo's groups have none there
            groups[name] = GroupId(name, _ranks(str(config["ranks"])))
            record.names[groups[name]] = _title(name, str(config["desc"]))
    entries = found["entries"]
    record.is_whole = not entries or entries[0]["record_id"] == 0
    ended = {
        (entry["pg_id"], entry["p2p_seq_id"]): entry["state"]
        for entry in entries
        if entry["profiling_name"].endswith(":coalesced")
    }
    for entry in entries:
        name, desc = entry["process_group"]
        group = groups.get(name)
        if group is None:
            group = groups[name] = GroupId(name, ())
            record.names[group] = _title(name, desc)
        _file(record, group, entry, ended)
    return record


@functools.lru_cache(maxsize=4096)
def _ranks(text: str) -> tuple[int, ...]:
    return tuple(map(int, json.loads(text)))


def _title(name: str, desc: str) -> str:
    if desc == _DEFAULT:
        return WORLD
    return desc if desc not in {"", "undefined"} else f"group {name}"


def _file(
    record: RankRecord, group: GroupId, entry: Mapping[str, Any], ended: Mapping[Any, str]
) -> None:
    name = entry["profiling_name"]
    backend, _, op = name.partition(":")
    if op == "coalesced":
        return
    state = _STATES[entry["state"]]
    if backend == "gloo" and entry.get("retired"):
        state = FINISHED  # gloo's stay "scheduled"
    call = Call(
        op=_OPS.get(op, op),
        number=int(entry["collective_seq_id"]),
        order=int(entry["record_id"]),
        state=state,
        shapes=tuple(tuple(map(int, sizes)) for sizes in entry["input_sizes"]),
        dtypes=tuple(map(str, entry["input_dtypes"])),
        where=_place(entry.get("frames", ())),
    )
    if not entry.get("is_p2p", False):
        if not call.op.startswith(("send", "recv")):
            record.calls.setdefault(group, []).append(call)
        return
    match = _PEERS.search(name)
    if match is None or not group.ranks:
        return
    own, other = int(match[2]), int(match[4])
    ends = (own, other) if match[1] == "send" else (other, own)
    call.op, call.peer, call.channel = match[1], group.ranks[other], f"{ends[0]}->{ends[1]}"
    coalesced = ended.get((entry["pg_id"], entry["p2p_seq_id"]))
    if coalesced is not None:
        call.state = _STATES[coalesced]
    if match[1] == "recv":
        call.shapes = tuple(map(tuple, entry["output_sizes"])) or call.shapes
    filed = record.messages.setdefault(group, {}).setdefault(f"{call.op} {call.channel}", [])
    call.number = len(filed) + 1
    filed.append(call)


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frame that is neither torch's nor ours."""
    for frame in frames:
        if not _is_library(frame["filename"]):
            return f"{frame['filename']}:{frame['line']} in {frame['name']}"
    return ""


@functools.lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    return _OF_TORCH.search(file) is not None
