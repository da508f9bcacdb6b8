"""Reads a folder of dumps in the form of torch's flight recorder, which `grid.watch` writes too.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypercomm.errors import DumpError, WorldSizeError
from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_ranks, shown
from hypercomm.tools.blame.calls import FROM_ANYBODY, WORLD, Call, Evidence, Group, Record

_MOST_BYTES = 64 * 2**20
_MOST_CHARACTERS = 4096
_MOST_RANKS = 2**20
_MOST_ENTRIES = 200_000
_MOST_TENSORS = 8
_MOST_DIMS = 64
_MOST_FRAMES = 200

_RANK = re.compile(r"(\d{1,7})(?:\.(?:json|pkl|pickle))?$")

_BROKEN = (
    *(EOFError, OSError, pickle.UnpicklingError, ArithmeticError, RecursionError, MemoryError),
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, struct.error),
)
"""The errors of reading a file that is not a complete dump."""


def read_folder(folder: str | os.PathLike[str], layout: RankLayout | None = None) -> Evidence:
    """Read the dumps of a job from a folder.

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
        >>> evidence.world_size, list(evidence.ranks)
        (2, [0, 1])
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
    ranks, unreadable = _read_files(files, notes)
    if not ranks:
        what = f"{len(files)} files, none of them a dump" if files else "empty"
        what += f": {notes[0]}" if notes else ""
        raise DumpError(
            f"the folder {shown(str(folder))} is {what}; dumps come from grid.watch() or "
            f"torch's flight recorder, and their names end with the rank: "
            f"hypercomm_watch_3.json, nccl_trace_rank_3"
        )
    world_size = _world_size(ranks, unreadable, layout)
    return Evidence(ranks, world_size, unreadable, layout, notes)


def _read_files(
    files: Sequence[Path], notes: list[str]
) -> tuple[dict[int, Record], dict[int, str]]:
    """Return the dumps by rank, and why others cannot be read."""
    records: dict[int, Record] = {}
    broken: dict[int, tuple[str, str]] = {}
    prefixes = set()
    for file in files:
        match, name = _RANK.search(file.name), _printable(file.name)
        if match is None or int(match[1]) >= _MOST_RANKS:
            continue
        prefix, rank = file.name[: match.start()], int(match[1])
        try:
            record = _read_file(file, rank)
        except _BROKEN as error:
            why = "a field is missing" if isinstance(error, KeyError) else str(error)[:200]
            why = _printable(why) or type(error).__name__
            broken[rank] = prefix, f"{name} cannot be read: {why}"
            notes.append(broken[rank][1])
            continue
        if rank in records:
            raise DumpError(
                f"rank {rank} has two dumps, {records[rank].file} and {name}; keep one of them"
            )
        prefixes.add(prefix)
        records[rank] = record
    unreadable = {  # others, such as "core.1", are no dumps
        rank: why
        for rank, (prefix, why) in broken.items()
        if prefix in prefixes and rank not in records
    }
    return dict(sorted(records.items())), unreadable


def _read_file(file: Path, rank: int) -> Record:
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
    content = file.read_bytes()
    if not content:
        raise ValueError("it is empty")
    fields = json.loads(content) if content.lstrip()[:1] in {b"{", b"["} else unpickle(content)
    if not isinstance(fields, dict):
        raise TypeError(f"it holds a {type(fields).__name__}; a dump is a dict")
    record = Record(rank, file=_printable(file.name))
    _read_dump(record, fields)
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


# ---- the form -----------------------------------------------------------------------------------

_STATES = {"completed": "finished", "started": "started", "scheduled": "queued"}
_OPS = {
    "_all_gather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
    "allreduce_coalesced": "all_reduce_coalesced",
}
_MESSAGE = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})( tag \d{1,20})?")
_LIBRARY = re.compile(
    r"[/\\]torch[/\\](distributed|utils|nn|autograd|_\w+)[/\\]|typing_extensions\.py$|"
    r"[/\\]hypercomm[/\\](compat|grid|launch|process_groups|tools|transfers)[/\\]|"
    r"[/\\]hypercomm[/\\]training\.py$|"
    r"[/\\]lib[/\\]python3\.\d+[/\\](?!site-packages)|^<"
)


def _read_dump(record: Record, fields: Mapping[str, Any]) -> None:
    """Read the form of torch 2.10 to 2.15: torch/distributed/flight_recorder/components."""
    _text(fields["version"])
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
        _read_entry(record, groups[name], entry, coalesced)
    if "hypercomm" in fields:
        _read_process(record, fields["hypercomm"], groups)


def _title(name: str, desc: str) -> str:
    if desc == "default_pg":
        return WORLD
    return f"group {name}" if desc in {"", "undefined"} else desc


def _read_entry(
    record: Record, group: Group, entry: Mapping[str, Any], coalesced: Mapping[Any, str]
) -> None:
    name = _text(entry["profiling_name"])
    backend, _, op = name.partition(":")
    is_message = entry.get("is_p2p", False) is True
    if op == "coalesced" or (op.startswith(("send", "recv ")) and not is_message):
        return
    number, order = _integer(entry["collective_seq_id"]), _integer(entry["record_id"])
    state = _STATES[_text(entry["state"])]
    if backend == "gloo" and entry.get("retired") is True:
        state = "finished"  # gloo leaves it at "scheduled"
    call = Call(_OPS.get(op, op), group, number, order, state)
    call.shapes, call.dtypes = _shapes(entry["input_sizes"]), _dtypes(entry["input_dtypes"])
    call.where = next(iter(_frames(entry.get("frames", []))), "")
    if entry.get("root") is not None:
        call.root = _integer(entry["root"])
    if op == FROM_ANYBODY:
        call.channel = "recv anybody"
    elif is_message:
        match = _MESSAGE.search(name)
        if match is None or not group.ranks:
            return
        own, other, tag = int(match[2]), int(match[3]), match[4] or ""
        source, to = (own, other) if match[1] == "send" else (other, own)
        call.op, call.peer = match[1], group.ranks[other]
        call.channel = f"{call.op} {source}->{to}{tag}"
        call.state = coalesced.get((entry["pg_id"], entry["p2p_seq_id"]), state)
        if call.op == "recv":
            call.shapes = _shapes(entry["output_sizes"]) or call.shapes
    if call.channel:
        call.number = record.counts.get((group, call.channel), 0) + 1
    call.agree_on_tensors()
    record.add(call)


def _read_process(record: Record, fields: Mapping[str, Any], groups: Mapping[str, Group]) -> None:
    """Read what `grid.watch` adds: the process, and how many calls each lane had."""
    record.host, record.why = _text(fields["host"]), _text(fields["why"])
    if fields["rank"] != record.rank:
        raise ValueError("the rank in its name is not the one in its content")
    record.place = _frames(fields["stacks"].get("MainThread", []))
    record.layout = RankLayout.from_json(json.dumps(fields["layouts"][""]))
    for name, channels in fields["counts"].items():
        for channel, count in channels.items():
            lane = groups[name], _text(channel)
            lost = _integer(count) - record.counts.get(lane, 0)
            for call in record.lanes.get(lane, ()) if lane[1] else ():
                call.number += lost
            record.counts[lane] = count
    record.is_whole = True


def _frames(value: object) -> tuple[str, ...]:
    """Return the frames outside torch, hypercomm and Python's library, innermost first."""
    frames = _list(value, _MOST_ENTRIES)[:_MOST_FRAMES]
    places = [(_text(one["filename"]), _integer(one["line"]), _text(one["name"])) for one in frames]
    return tuple(f"{file}:{line} in {name}" for file, line, name in places if not _is_library(file))


@functools.lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    return _LIBRARY.search(file) is not None


def _world_size(
    ranks: Mapping[int, Record], unreadable: Mapping[int, str], layout: RankLayout | None
) -> int:
    """Return the number of ranks of WORLD, else that of the layout or of the ranks in groups."""
    groups = [(g, title, one.file) for one in ranks.values() for g, title in one.titles.items()]
    worlds = {group.ranks: file for group, title, file in groups if title == WORLD and group.ranks}
    if len(worlds) > 1:
        files = " and ".join(sorted(worlds.values())[:2])
        raise DumpError(f"{files} are of two jobs; keep the dumps of one of them in the folder")
    size = 1 + max(0, *ranks, *unreadable, *(max(g.ranks, default=0) for g, _, _ in groups))
    end = 0 if layout is None else layout.size + layout.rank_offset
    size = len(next(iter(worlds), ())) or max(size, end)
    if layout is not None and (end > size or any(rank not in layout for rank in ranks)):
        raise WorldSizeError(
            f"--layout {layout} has {layout.size} ranks, but the job has {size}, with dumps of "
            f"{format_ranks(list(ranks))}; give the layout of the job"
        )
    return size
