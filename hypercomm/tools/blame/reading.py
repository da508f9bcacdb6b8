"""Reads a folder of dumps: those of torch's flight recorder and those of `grid.watch`.

A dump is data from elsewhere. A pickle is decoded to numbers, texts, lists and dicts only, and
every field is checked for its type and size before it is used.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypercomm.errors import DumpError, WorldSizeError
from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_ranks, shown
from hypercomm.tools.blame.calls import FROM_ANYBODY, WORLD, Call, Evidence, Group, Record

MARK, FORM = "hypercomm_watch", 1
"""The field that marks the file of a watch, and the form that is written."""

_MOST_BYTES = 64 * 2**20
_MOST_CHARACTERS = 4096
_MOST_RANKS = 2**20
_MOST_ENTRIES = 200_000
_MOST_TENSORS = 8
_MOST_DIMS = 64

_RANK = re.compile(r"(\d{1,7})(?:\.(?:json|pkl|pickle|bin|dump))?$")
_USUAL_PREFIX = re.compile(r"(trace|rank|watch|dump)\w*$")
"""How a dump is named if no readable dump has the same prefix."""

_BROKEN = (
    *(EOFError, OSError, pickle.UnpicklingError, ArithmeticError, RecursionError, MemoryError),
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, struct.error),
)
"""The errors of reading a file that is not a complete dump."""


def read_folder(folder: str | os.PathLike[str], layout: RankLayout | None = None) -> Evidence:
    """Read the dumps of a job from a folder.

    The dumps of torch's flight recorder are judged if every watched rank has one; the files of a
    watch then add hosts, stacks and layouts.

    Args:
        folder: The folder; the name of each dump ends with the rank: "nccl_trace_rank_3",
            "hypercomm_watch_3.json".
        layout: The layout of the job, which replaces those in the dumps.

    Raises:
        DumpError: The folder cannot be read, holds no dump, two of one rank, or those of two jobs.
        WorldSizeError: The layout has other ranks than the job.

    Example:
        >>> import json, tempfile
        >>> empty = {"version": "2.10", "pg_config": {}, "entries": []}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for rank in range(2):
        ...         _ = Path(folder, f"trace_{rank}").write_text(json.dumps(empty))
        ...     evidence = read_folder(folder)
        >>> evidence.world_size, evidence.source
        (2, 'flight recorder')
    """
    try:
        files = sorted(entry for entry in Path(folder).iterdir() if entry.is_file())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DumpError(
            f"cannot read the folder {shown(str(folder))}: {why}; give the folder that the ranks "
            f"wrote their dumps to"
        ) from None
    notes: list[str] = []
    records, unreadable = _read_files(files, notes)
    if not records:
        what = f"{len(files)} files, none of them a dump" if files else "empty"
        what += f": {notes[0]}" if notes else ""
        raise DumpError(
            f"the folder {shown(str(folder))} is {what}; dumps come from grid.watch() or "
            f"torch's flight recorder, and their names end with the rank: "
            f"hypercomm_watch_3.json, nccl_trace_rank_3"
        )
    watches = _by_rank([record for record in records if record.source == "watch"])
    traces = _by_rank([record for record in records if record.source != "watch"])
    ranks = traces
    if watches and not watches.keys() <= traces.keys():
        ranks = watches
        why = "is of torch's flight recorder; the files of the watch are judged"
        unreadable.update({rank: f"{traces[rank].file} {why}" for rank in traces})
    elif watches:
        for rank, other in watches.items():
            for field in ("host", "pid", "place", "why", "layouts", "world_size", "job"):
                setattr(traces[rank], field, getattr(other, field))
    for found in (watches, traces):
        _check_one_job(list(found.values()), notes)
    unreadable = {rank: why for rank, why in unreadable.items() if rank not in ranks}
    source = next(iter(ranks.values())).source
    world_size = _world_size(ranks, unreadable, layout)
    if layout is not None:
        _check_layout(layout, ranks, world_size)
    return Evidence(ranks, world_size, source, unreadable, layout, notes)


def _read_files(files: Sequence[Path], notes: list[str]) -> tuple[list[Record], dict[int, str]]:
    records, broken, ignored, prefixes = [], [], [], set()
    for file in files:
        match = _RANK.search(file.name)
        if match is None or int(match[1]) >= _MOST_RANKS:
            ignored.append(_printable(file.name))
            continue
        prefix, rank = file.name[: match.start()], int(match[1])
        try:
            records.append(_read_file(file, rank))
            prefixes.add(prefix)
        except _BROKEN as error:
            why = f"{_printable(file.name)} cannot be read: {_why(error)}"
            broken.append((prefix, rank, why))
    unreadable = {}
    for prefix, rank, why in broken:
        if prefix in prefixes or _USUAL_PREFIX.search(prefix):
            unreadable[rank] = why
            notes.append(why)
        else:  # "core.1"
            notes.append(f"{why}; it is ignored, because no dump has a name like it")
    if ignored:
        names = f"{', '.join(ignored[:3])}{', ...' if len(ignored) > 3 else ''}"
        notes.append(f"ignored, because the name does not end with a rank: {names}")
    return records, unreadable


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return "it is not a dump, or has another form: a field is missing"
    if isinstance(error, (EOFError, json.JSONDecodeError)) or "truncated" in str(error):
        return f"it is cut off, or not a dump: {_printable(str(error)[:200])}"
    return _printable(str(error)[:200]) or type(error).__name__


def _read_file(file: Path, rank: int) -> Record:
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
    content = file.read_bytes()
    if not content:
        raise ValueError("it is empty")
    is_json = content.lstrip()[:1] in {b"{", b"["}
    fields = json.loads(content) if is_json else unpickle(content)
    if not isinstance(fields, dict):
        raise TypeError(f"it holds a {type(fields).__name__}; a dump is a dict")
    record = Record(rank, file=_printable(file.name))
    if MARK in fields and is_json:
        _read_watch(record, fields)
    else:
        _read_flight_recorder(record, fields)
    return record


# ---- values -------------------------------------------------------------------------------------


class _Operations(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        raise pickle.UnpicklingError(
            f"it has the pickle operation {code:#x}; a dump holds only numbers, texts, lists and "
            f"dicts, and nothing in it was run"
        )


def _load_tuple(size: int) -> Any:
    def load(self: Any) -> None:
        self.stack[-size:] = [self.stack[-size:]]

    return load


class _PlainUnpickler(pickle._Unpickler):
    """Builds plain containers only; tuples become lists, which cannot be keys that are hashed."""

    dispatch = _Operations(
        {
            code: pickle._Unpickler.dispatch[code]
            for code in b"\x80\x95\x94\x88\x89\x8a\x8c\x8d(.])}NJKMGXtaesuhjqr"
        }
    )
    dispatch[ord("t")] = pickle._Unpickler.dispatch[ord("l")]
    dispatch[ord(")")] = dispatch[ord("]")]
    dispatch.update({code: _load_tuple(size) for size, code in enumerate(b"\x85\x86\x87", 1)})


def unpickle(content: bytes) -> object:
    """Read a pickle that holds plain values; code in it is not run.

    Raises:
        pickle.UnpicklingError, EOFError, ValueError: It holds more, or is cut off.

    Example:
        >>> import os, pickle
        >>> unpickle(pickle.dumps({"version": "2.10"}))
        {'version': '2.10'}
        >>> unpickle(pickle.dumps(os.getcwd))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        _pickle.UnpicklingError: it has the pickle operation 0x93; a dump holds only numbers, ...
    """
    return _PlainUnpickler(io.BytesIO(content)).load()


def _integer(value: object) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError("a field that must be an integer of 64 bits is not one")
    return value


def _text(value: object, most: int = _MOST_CHARACTERS) -> str:
    if type(value) is not str or len(value) > most:
        raise ValueError(f"a field that must be a text of up to {most} characters is not one")
    return _printable(value)


def _printable(text: str) -> str:
    """Replace control characters, which would change the terminal."""
    return text if text.isprintable() else re.sub(r"[^ -~]", "?", text)


def _list(value: object, most: int) -> list[Any]:
    if type(value) is not list or len(value) > most:
        raise ValueError(f"a field that must be a list of up to {most} items is not one")
    return value


def _ranks(value: object) -> tuple[int, ...]:
    ranks = tuple(map(_integer, _list(value, _MOST_RANKS)))
    if any(not 0 <= rank < _MOST_RANKS for rank in ranks):
        raise ValueError(f"a rank is not in 0..{_MOST_RANKS - 1}")
    return ranks


@functools.lru_cache(maxsize=4096)
def _ranks_in(text: str) -> tuple[int, ...]:
    return _ranks(json.loads(text))


def _shapes(value: object) -> tuple[tuple[int, ...], ...]:
    shapes = _list(value, _MOST_ENTRIES)[:_MOST_TENSORS]
    return tuple(tuple(map(_integer, _list(shape, _MOST_DIMS))) for shape in shapes)


def _dtypes(value: object) -> tuple[str, ...]:
    return tuple(map(_text, _list(value, _MOST_ENTRIES)[:_MOST_TENSORS]))


# ---- the two forms ------------------------------------------------------------------------------


def _read_watch(record: Record, fields: Mapping[str, Any]) -> None:
    if fields[MARK] != FORM:
        raise ValueError(f"its form is not {FORM}, which this hypercomm reads")
    if fields["rank"] != record.rank:
        raise ValueError("the rank in its name is not the one in its content")
    record.source = "watch"
    record.world_size, record.pid = _integer(fields["world_size"]), _integer(fields["pid"])
    if not record.rank < record.world_size <= _MOST_RANKS:
        raise ValueError(f"its world_size is not in {record.rank + 1}..{_MOST_RANKS}")
    record.job, record.host = _text(fields["job"]), _text(fields["host"])
    record.why = _text(fields["why"])
    record.version = f"torch {_text(fields['torch'])}, hypercomm {_text(fields['hypercomm'])}"
    record.place = tuple(map(_text, _list(fields["place"], _MOST_ENTRIES)))
    for name, layout in fields["layouts"].items():
        record.layouts[name] = RankLayout.from_json(json.dumps(layout))
    for entry in _list(fields["groups"], _MOST_ENTRIES):
        group = Group(_text(entry["name"]), _ranks(entry["ranks"]))
        record.titles[group] = _text(entry["title"])
        for one in _list(entry["calls"], _MOST_ENTRIES):
            peer, root = one.get("peer"), one.get("root")
            call = Call(
                _text(one["op"]),
                group,
                _integer(one["number"]),
                _integer(one["order"]),
                _text(one["state"]),
                shapes=_shapes(one["shapes"]),
                dtypes=_dtypes(one["dtypes"]),
                where=_text(one["where"]),
                peer=None if peer is None else _integer(peer),
                root=None if root is None else _integer(root),
                error=_text(one.get("error", "")),
            )
            if call.op == FROM_ANYBODY:
                call.channel = "recv anybody"
            elif call.peer is not None:
                call.channel = f"{call.op} {_text(one['channel'])}"
            call.agree_on_tensors()
            record.add(call)


_STATES = {"completed": "finished", "started": "started", "scheduled": "queued"}
_OPS = {
    "_all_gather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
_MESSAGE = re.compile(r"(send|recv) (\d{1,7})(->|<-)(\d{1,7})")
_LIBRARY = re.compile(
    r"[/\\]torch[/\\](distributed|utils|nn|autograd|_\w+)[/\\]|typing_extensions\.py$|"
    r"contextlib\.py$|[/\\]hypercomm[/\\](?!testing|tools)"
)


def _read_flight_recorder(record: Record, fields: Mapping[str, Any]) -> None:
    """Read the form of torch 2.10 to 2.15: torch/distributed/flight_recorder/components."""
    record.source = "flight recorder"
    record.version = f"version {_text(fields['version'])} of the flight recorder"
    groups: dict[str, Group] = {}
    for uid, config in fields["pg_config"].items():
        name = _text(config.get("name") or uid)
        if name:  # gloo leaves it empty
            group = groups[name] = Group(name, _ranks_in(_text(config["ranks"], _MOST_BYTES)))
            record.titles[group] = _title(name, _text(config["desc"]))
    entries = _list(fields["entries"], _MOST_ENTRIES)
    record.is_whole = not entries or entries[0]["record_id"] == 0
    coalesced = {
        (_integer(entry["pg_id"]), _integer(entry["p2p_seq_id"])): _STATES[_text(entry["state"])]
        for entry in entries
        if _text(entry["profiling_name"]).endswith(":coalesced")
    }
    for entry in entries:
        name, desc = map(_text, _list(entry["process_group"], 2))
        if name not in groups:
            groups[name] = Group(name, ())
            record.titles[groups[name]] = _title(name, desc)
        call = _read_entry(record, groups[name], entry, coalesced)
        if call is not None:
            call.agree_on_tensors()
            record.add(call)


def _title(name: str, desc: str) -> str:
    if desc == "default_pg":
        return WORLD
    return f"group {name}" if desc in {"", "undefined"} else desc


def _read_entry(
    record: Record, group: Group, entry: Mapping[str, Any], coalesced: Mapping[Any, str]
) -> Call | None:
    name = _text(entry["profiling_name"])
    backend, _, op = name.partition(":")
    is_message = entry.get("is_p2p", False) is True
    if op == "coalesced" or (not is_message and op.startswith(("send", "recv"))):
        return None
    number, order = _integer(entry["collective_seq_id"]), _integer(entry["record_id"])
    state = _STATES[_text(entry["state"])]
    if backend == "gloo" and entry.get("retired") is True:
        state = "finished"  # gloo leaves it at "scheduled"
    call = Call(_OPS.get(op, op), group, number, order, state)
    call.shapes, call.dtypes = _shapes(entry["input_sizes"]), _dtypes(entry["input_dtypes"])
    call.where = _place(entry.get("frames", []))
    if not is_message:
        return call
    match = _MESSAGE.search(name)
    if match is None or not group.ranks:
        return None
    own, other = int(match[2]), int(match[4])
    source, to = (own, other) if match[1] == "send" else (other, own)
    call.op, call.peer, call.channel = match[1], group.ranks[other], f"{match[1]} {source}->{to}"
    call.state = coalesced.get((entry["pg_id"], entry["p2p_seq_id"]), state)
    if match[1] == "recv":
        call.shapes = _shapes(entry["output_sizes"]) or call.shapes
    call.number = len(record.lanes.get((group, call.channel), ())) + 1
    return call


def _place(frames: object) -> str:
    """Return the innermost frame outside torch and hypercomm."""
    for frame in _list(frames, _MOST_ENTRIES)[:200]:
        file = _text(frame["filename"])
        if not _is_library(file):
            return f"{file}:{_integer(frame['line'])} in {_text(frame['name'])}"
    return ""


@functools.lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    return _LIBRARY.search(file) is not None


# ---- one job ------------------------------------------------------------------------------------


def _by_rank(records: Sequence[Record]) -> dict[int, Record]:
    found: dict[int, Record] = {}
    for record in sorted(records, key=lambda record: record.rank):
        first = found.setdefault(record.rank, record)
        if first is not record:
            raise DumpError(
                f"rank {record.rank} has two dumps, {first.file} and {record.file}; keep the "
                f"dumps of one hang"
            )
    return found


def _check_one_job(records: Sequence[Record], notes: list[str]) -> None:
    worlds = {
        record.rank: next((g.ranks for g, title in record.titles.items() if title == WORLD), ())
        for record in records
    }
    for fact in (
        lambda one: one.world_size,
        lambda one: one.job,
        lambda one: worlds[one.rank],
    ):
        known = [record for record in records if fact(record)]
        other = next((one for one in known if fact(one) != fact(known[0])), None)
        if other is not None:
            raise DumpError(
                f"{known[0].file} and {other.file} are of two jobs; keep the dumps of one of them "
                f"in the folder"
            )
    usual = Counter(record.version for record in records).most_common(1)
    for record in records:
        if record.version != usual[0][0]:
            notes.append(f"{record.file} is of {record.version}, most others of {usual[0][0]}")
            break


def _world_size(
    ranks: Mapping[int, Record], unreadable: Mapping[int, str], layout: RankLayout | None
) -> int:
    """Return the number of ranks in a dump, else the highest rank that is mentioned plus one."""
    for record in ranks.values():
        if record.world_size:
            return record.world_size
        for group, title in record.titles.items():
            if title == WORLD and group.ranks:
                return len(group.ranks)
    groups = {group for record in ranks.values() for group in record.titles}
    largest = max((max(group.ranks) for group in groups if group.ranks), default=0)
    of_layout = layout.size + layout.rank_offset - 1 if layout is not None else 0
    return max(largest, of_layout, *ranks, *unreadable) + 1


def _check_layout(layout: RankLayout, ranks: Mapping[int, Record], world_size: int) -> None:
    outside = [rank for rank in ranks if rank not in layout]
    last = layout.size + layout.rank_offset
    if outside or last > world_size:
        has = f"dumps of ranks {format_ranks(outside)}" if outside else f"{world_size} ranks"
        raise WorldSizeError(
            f"--layout {layout} has {layout.size} ranks, but the job has {has}; give the layout "
            f"of the job"
        )
