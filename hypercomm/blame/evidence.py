"""Represents the recorded calls of a job's ranks, in one form for dumps and simulations.

Dumps have the format of torch's flight recorder. `grid.watch` writes this format, too. A dump is
untrusted data: only pickles of plain values are read, and the type of each number and text is
checked before the value is used.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import pickle
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from hypercomm.errors import ToolError, WorldSizeError
from hypercomm.layout import RankLayout
from hypercomm.layout.text import first_n, format_coords, format_ranks, short_repr

WORLD = "WORLD"  # the title of the group of all ranks
FROM_ANYBODY = "recv anybody"  # the channel of messages that cannot be matched


@attrs.frozen(cache_hash=True)
class LoggedGroup:
    """A process group.

    Attributes:
        name: The name of the group in torch.
        ranks: The ranks of the group.
        title: The dims of the group, as in "cp+dp of expert". A group without dims is called
            "WORLD" or "group 7". In a simulation, the title may be "".
    """

    name: str
    ranks: Sequence[int]
    title: str = attrs.field(default="", eq=False)


@attrs.define(eq=False)
class LoggedCall:
    """One collective, send or receive of one rank, or one creation of a group.

    Attributes:
        op: The name of the call in torch.distributed, such as "all_reduce".
        group: The group.
        number: The position of the call in its lane, counted from 1. A lane consists of all
            collectives of one group, or of all calls of one channel.
        order: The position of the call among all calls of the rank.
        state: "queued", "started" or "finished".
        terms: The values that must be equal on all ranks of the group, such as op, sizes and
            dtypes.
        shapes: The shapes of the first tensors.
        dtypes: The dtypes of these tensors.
        where: The file and line of the user's code that makes the call, or "" if unknown.
        peer: The other rank of a send or receive.
        channel: "" for a collective, "send 0->1" for a message, "recv anybody" for a receive
            without a source.
        source: The simulated call, or None outside simulations.
    """

    op: str
    group: LoggedGroup
    number: int
    order: int
    state: str
    terms: tuple[object, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    where: str = ""
    peer: int | None = None
    channel: str = ""
    source: Any = None

    def __str__(self) -> str:
        """Return the call with its group: "all_reduce number 5 of tp (ranks 2..3)"."""
        end = ""
        if self.channel:
            peer = "any rank" if self.peer is None else f"rank {self.peer}"
            end = f" {'to' if self.op == 'send' else 'from'} {peer}"
        ranks = format_ranks(self.group.ranks)
        return f"{self.op} number {self.number}{end} of {self.group.title} (ranks {ranks})"

    @property
    def at(self) -> str:
        """The file and line in words: " at train.py:40 in step"."""
        return f" at {self.where}" if self.where else ""

    @property
    def tensors(self) -> str:
        """The tensors in words: " with (4, 8) float32"."""
        dtypes = " ".join(dict.fromkeys(self.dtypes))
        return f" with {first_n(self.shapes, 2)} {dtypes}" if self.shapes else ""


# A lane is a group and a channel. The calls of one lane are numbered together.
Lane = tuple[LoggedGroup, str]


@attrs.define(eq=False)
class RankLog:
    """The calls of one rank, and facts about its process from its dump.

    Attributes:
        rank: The rank.
        lanes: The calls of each lane, in order.
        counts: The `number` of the last call in each lane.
        groups: The groups of the rank.
        is_whole: Whether `lanes` begins with the first call of the rank. If so, a lane that is not
            in `counts` had no calls.
        file: The name of the dump.
        host: The host, or "" if unknown.
        why: The reason why the dump was written.
        place: The stack frames of the main thread, innermost first.
        region: The part of torch in which the main thread is, if collectives there are not
            recorded, such as "backward", or "".
        layout: The layout of the grid, or None if unknown.
    """

    rank: int
    lanes: dict[Lane, list[LoggedCall]] = attrs.field(factory=dict)
    counts: dict[Lane, int] = attrs.field(factory=dict)
    groups: Collection[LoggedGroup] = ()
    is_whole: bool = True
    file: str = ""
    host: str = ""
    why: str = ""
    place: tuple[str, ...] = ()
    region: str = ""
    layout: RankLayout | None = None

    def add(self, call: LoggedCall) -> None:
        """Append a call to its lane."""
        lane = call.group, call.channel
        self.lanes.setdefault(lane, []).append(call)
        self.counts[lane] = call.number

    @property
    def has_left(self) -> bool:
        """Whether the rank has left its watch without an error."""
        return self.why.startswith("left")

    @property
    def state(self) -> str:
        """What the rank did last: "left the watch", "raised ...", "is at train.py:7 in load"."""
        if self.why.startswith(("left", "raised")):
            return self.why
        return f"is at {self.place[0]}" if self.place else ""

    def is_at(self, call: LoggedCall) -> bool:
        """Return whether the rank may be inside a call, according to its stack."""
        return not self.place or call.where in self.place


@attrs.define(eq=False)
class Evidence:
    """The calls that the ranks of one job recorded.

    Attributes:
        ranks: The log of each rank, by rank.
        world_size: The number of ranks.
        unreadable: Maps each rank whose dump cannot be read to the reason.
        layout: The layout of the job, or None if unknown.
    """

    ranks: dict[int, RankLog]
    world_size: int
    unreadable: dict[int, str] = attrs.field(factory=dict)
    layout: RankLayout | None = None

    @property
    def missing(self) -> list[int]:
        """The ranks without a readable dump."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]

    @cached_property
    def lanes(self) -> dict[Lane, dict[int, list[LoggedCall]]]:
        """The calls of each lane, by rank."""
        found: dict[Lane, dict[int, list[LoggedCall]]] = {}
        for record in self.ranks.values():
            for lane, calls in record.lanes.items():
                found.setdefault(lane, {})[record.rank] = calls
        return found

    def last(self, rank: int, group: LoggedGroup, channel: str = "") -> float:
        """Return the `number` of a rank's last call in a lane, or infinity if it is unknown."""
        record = self.ranks.get(rank)
        if record is None:
            return 0
        return record.counts.get((group, channel), 0 if record.is_whole else math.inf)

    def has_channels(self, rank: int, group: LoggedGroup) -> bool:
        """Return whether a rank's messages in a group can be matched with other ranks' messages."""
        record = self.ranks.get(rank)
        return record is None or (record.is_whole and (group, FROM_ANYBODY) not in record.counts)

    def describe(self, rank: int) -> dict[str, Any]:
        """Return a rank with its coordinates and its host, if they are known."""
        record = self.ranks.get(rank)
        layouts = (self.layout, None if record is None else record.layout)
        known = (one.coords(rank) for one in layouts if one is not None and rank in one)
        return {
            "rank": rank,
            "coords": next(known, {}),
            "host": "" if record is None else record.host,
        }

    def name(self, rank: int) -> str:
        """Return a rank with coordinates and host, such as "rank 3 (tp=1, dp=1; host a)"."""
        known = self.describe(rank)
        host = f"host {known['host']}" if known["host"] else ""
        details = "; ".join(filter(None, [format_coords(known["coords"]), host]))
        return f"rank {rank} ({details})" if details else f"rank {rank}"


# ---- a folder of dumps --------------------------------------------------------------------------

_MOST_BYTES = 64 * 2**20
_MOST_CHARACTERS = 4096
_MOST_TENSORS = 8

# The rank at the end of a dump's file name. "core.1" is not a dump.
_RANK = re.compile(r"(?<![\d.])(\d{1,6})(?:\.(?:json|pkl|pickle))?$")


def read_folder(folder: str | os.PathLike[str], layout: RankLayout | None = None) -> Evidence:
    """Read the dumps of a job from a folder.

    Args:
        folder: The folder. The name of each dump ends with the rank, as in "nccl_trace_rank_3" and
            "hypercomm_watch_3.json".
        layout: The layout of the job. Default: the layout in the dumps.

    Raises:
        ToolError: The folder cannot be read, contains no dump, contains two dumps of one rank, or
            contains dumps of two jobs.
        WorldSizeError: The layout and the job have different numbers of ranks.

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
        why = getattr(error, "strerror", None) or error
        raise ToolError(
            f"cannot read the folder {short_repr(str(folder))}: {why}; give the folder that the "
            f"ranks wrote their dumps to"
        ) from None
    records: dict[int, RankLog] = {}
    unreadable: dict[int, str] = {}
    for file in files:
        match = _RANK.search(file.name)
        if match is None:
            continue
        record = RankLog(int(match[1]), file=_printable(file.name))
        try:
            _read_dump(record, _fields_of(file), layout)
        except Exception as error:  # noqa: BLE001 - a broken dump does not prevent a verdict
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            why = f"{record.file} cannot be read as a dump: {_printable(why[:200])}"
            unreadable[record.rank] = why
            continue
        if record.rank in records:
            both = f"{records[record.rank].file} and {record.file}"
            raise ToolError(f"rank {record.rank} has two dumps, {both}; delete one of them")
        records[record.rank] = record
    if not records:
        raise ToolError(
            f"the folder {short_repr(str(folder))}: "
            f"{next(iter(unreadable.values()), 'found no dump')}; dumps come from grid.watch() or "
            f"torch's flight recorder, and their names end with the rank: hypercomm_watch_3.json, "
            f"nccl_trace_rank_3"
        )
    records = dict(sorted(records.items()))
    unreadable = {rank: why for rank, why in unreadable.items() if rank not in records}
    world_size = _world_size(records, unreadable, layout)
    layout = layout or next((one.layout for one in records.values() if one.layout), None)
    return Evidence(records, world_size, unreadable, layout)


def _world_size(
    records: Mapping[int, RankLog], unreadable: Mapping[int, str], layout: RankLayout | None
) -> int:
    """Return the size of WORLD. If it is unknown, use the layout, or else the largest rank."""
    groups = [(group, one.file) for one in records.values() for group in one.groups]
    worlds = {group.ranks: file for group, file in groups if group.title == WORLD}
    if len(worlds) > 1:
        files = " and ".join(sorted(worlds.values())[:2])
        raise ToolError(f"{files} belong to two jobs; keep the dumps of only one job in the folder")
    known = max([*records, *unreadable]) + 1
    size = len(next(iter(worlds), ())) or (known if layout is None else layout.size)
    if layout is not None and (layout.size != size or known > size):
        raise WorldSizeError(
            f"--layout {layout} has {layout.size} ranks, but the job has {size}, with dumps of "
            f"ranks {format_ranks(list(records))}; give the layout of the job"
        )
    return size


# ---- decoding and checking ----------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """Reads a pickle of plain values. Code in the pickle is not run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is not a plain value")


def _fields_of(file: Path) -> Any:
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
    content = file.read_bytes()
    is_json = content.lstrip()[:1] in {b"{", b"["}
    return json.loads(content) if is_json else _PlainUnpickler(io.BytesIO(content)).load()


def _integer(value: object) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError("a field is not an integer of 64 bits")
    return value


def _text(value: object) -> str:
    if type(value) is not str or len(value) > _MOST_CHARACTERS:
        raise ValueError(f"a field must be a text of up to {_MOST_CHARACTERS:,} characters")
    return _printable(value)


def _printable(text: str) -> str:
    """Return text with control characters replaced, because they would control the terminal."""
    return text if text.isprintable() else re.sub(r"[^ -~]", "?", text)


@functools.lru_cache(maxsize=4096)
def _ranks(text: str) -> tuple[int, ...]:
    return tuple(map(_integer, json.loads(text)))


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(_integer, shape)) for shape in value[:_MOST_TENSORS])


def _user_frames(frames: Any) -> Iterator[str]:
    """Yield the frames outside torch, hypercomm and Python's library, innermost first."""
    for one in frames:
        file, line, name = _text(one["filename"]), _integer(one["line"]), _text(one["name"])
        if not _LIBRARY.search(file):
            yield f"{file}:{line} in {name}"


def _region(frames: Any) -> str:
    """Return the part of torch in `_REGIONS` in which the innermost frames are, or "".

    Collectives of these parts are called from C++, so a watch cannot record them.
    """
    for one in frames:
        frame = f"{_text(one['filename'])}:{_text(one['name'])}".replace("\\", "/")
        for region, pattern in _REGIONS.items():
            if pattern.search(frame):
                return region
        if not _LIBRARY.search(frame) or "/torch/nn/modules/" in frame:
            break
    return ""


# ---- the format of torch 2.10 to 2.15: torch/distributed/flight_recorder/components -------------

_STATES = {"completed": "finished", "started": "started", "scheduled": "queued"}
OPS = {
    "_all_gather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
# Ops whose first tensors have the same size on every rank. Tensors of other ops may be uneven.
_ONE_SHAPE = {"all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "send", "recv"}
_ONE_SHAPE |= {"reduce_scatter_tensor"}

_MESSAGE = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})( tag \d{1,20})?")
_LIBRARY = re.compile(
    r"[/\\]torch[/\\](distributed|utils|nn|autograd|_\w+)[/\\]|typing_extensions\.py$|"
    r"[/\\]torch[/\\]_\w+\.py|[/\\]c[a-z2-7]{51}\.py|"  # the second: written by torch.compile
    r"[/\\]hypercomm[/\\](blame|compat|grid|launch|process_groups|tools|transfers?)[/\\]|"
    r"[/\\]hypercomm[/\\]training\.py$|"
    r"[/\\]lib[/\\]python3\.\d+[/\\](?!site-packages)|^<"
)


# Parts of torch that wait for other ranks without a call of `ProcessGroup` from Python.
_REGIONS = {
    "backward": re.compile(r"/torch/autograd/graph\.py:_engine_run_backward$"),
    "DTensor or a functional collective": re.compile(
        r"/torch/distributed/(tensor/|_functional_collectives\.py:)"
    ),
    "compiled code": re.compile(r"/torch/(_inductor|_dynamo|_functorch)/"),
    "DistributedDataParallel": re.compile(r"/torch/nn/parallel/distributed\.py:_"),
    "the creation of a group": re.compile(
        r"/hypercomm/process_groups/|/distributed_c10d\.py:(new_|split_|init_|_new_|_store_)"
    ),
}
# An error in a program's own code, and not in communication
_OWN_ERROR = re.compile(r"raised (?!RuntimeError|Dist\w*Error|GroupCreationTimeout)")


def _read_dump(record: RankLog, fields: Mapping[str, Any], layout: RankLayout | None) -> None:
    entries = fields["entries"]
    process = fields.get("hypercomm")
    if process is not None:  # fields that `grid.watch` adds
        record.host = _text(process["host"])
        record.why = _text(process["why"])
        record.place = tuple(_user_frames(process["stack"]))
        record.region = "" if _OWN_ERROR.match(record.why) else _region(process["stack"])
        record.layout = RankLayout(**process["layouts"][""])
    groups: dict[str, LoggedGroup] = {}
    for config in fields["pg_config"].values():
        name = _text(config["name"])
        desc = _text(config["desc"])
        ranks = _ranks(config["ranks"])
        title = desc if desc not in {"", "undefined"} else _dims_of(ranks, layout or record.layout)
        title = WORLD if desc == "default_pg" else title or f"group {name}"
        groups[name] = LoggedGroup(name, ranks, title)
    record.groups = groups.values()
    record.is_whole = process is not None or not entries or entries[0]["record_id"] == 0
    whole = [one for one in entries if one["profiling_name"].endswith(":coalesced")]
    batches = {(one["pg_id"], one["p2p_seq_id"]): one["state"] for one in whole}
    for entry in entries:
        call = _read_call(entry, groups[_text(entry["process_group"][0])], batches)
        if call is not None:
            if call.channel:
                last = record.counts.get((call.group, call.channel), 0)
                call.number = last + 1 if process is None else _integer(entry["p2p_seq_id"])
            record.add(call)
    for name, counts in {} if process is None else process["counts"].items():
        for channel, number in counts.items():
            lane = groups[name], channel
            record.counts[lane] = max(_integer(number), record.counts.get(lane, 0))


def _dims_of(ranks: Sequence[int], layout: RankLayout | None) -> str:
    """Return the dims over which these ranks form a group of the layout, or "" if they do not."""
    if layout is None or not all(rank in layout for rank in ranks):
        return ""
    coords = [layout.coords(rank) for rank in ranks]
    dims = [dim for dim in layout.dim_names if len({one[dim] for one in coords}) > 1]
    return "+".join(dims) if dims and layout.size_of(*dims) == len(ranks) else ""


def _read_call(
    entry: Mapping[str, Any], group: LoggedGroup, batches: Mapping[Any, str]
) -> LoggedCall | None:
    """Return the call of an entry, or None for a batch, whose messages have their own entries."""
    op = _text(entry["profiling_name"]).partition(":")[2]
    message = _MESSAGE.search(op)
    state = _text(entry["state"])
    if op == "coalesced" or (message is not None and not entry["is_p2p"]):
        return None
    op = OPS.get(op, op)
    call = LoggedCall(
        op, group, _integer(entry["collective_seq_id"]), _integer(entry["record_id"]), ""
    )
    call.shapes = _shapes(entry["input_sizes"])
    call.dtypes = tuple(map(_text, entry["input_dtypes"][:_MOST_TENSORS]))
    call.where = next(_user_frames(entry.get("frames", [])), "")
    if message is not None:
        call.op, own, other, tag = message.groups("")
        call.peer = group.ranks[int(other)]
        route = f"{own}->{other}{tag}" if call.op == "send" else f"{other}->{own}{tag}"
        call.channel = f"{call.op} {route}"
        state = batches.get((entry["pg_id"], entry["p2p_seq_id"]), state)
        if call.op == "recv":
            call.shapes = _shapes(entry["output_sizes"]) or call.shapes
    elif op == "recv_anysource":
        call.op = "recv"
        call.channel = FROM_ANYBODY
    call.state = _STATES[state]
    sizes = tuple(map(math.prod, call.shapes)) if call.op in _ONE_SHAPE else ()
    dtypes = call.dtypes if call.op in _ONE_SHAPE else tuple(sorted(set(call.dtypes)))
    if entry.get("root") is not None:
        call.op += f" from rank {_integer(entry['root'])} of the group"
    call.terms = ("message" if call.channel else call.op, sizes, dtypes)
    return call
