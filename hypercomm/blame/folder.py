"""Reading a folder of dumps: which files are there, and whether they are of one job."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hypercomm.blame import flight_recorder, watched
from hypercomm.blame.records import WORLD, Evidence, RankRecord
from hypercomm.errors import DumpError, WorldSizeError
from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_ranks, shown

_RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle|bin|dump))?$")
"""How the name of a dump ends: with the rank."""

_USUAL = re.compile(r"(trace|rank|watch|dump)\w*$")
"""What stands before the rank where no dump that can be read says how the others are named."""

_MOST_NAMED = 3

_BROKEN = (
    *(EOFError, OSError, pickle.UnpicklingError, UnicodeDecodeError, json.JSONDecodeError),
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, MemoryError),
    OverflowError,
)
"""What reading a file that is no whole dump raises."""


def read_folder(folder: str | os.PathLike[str], layout: RankLayout | None = None) -> Evidence:
    """Read the dumps of a job from a folder.

    torch's flight recorder dumps are what counts where every rank has one that has any; what our
    own watch wrote then adds hosts, places in the code and layouts.

    Args:
        folder: Where they are, each named so that the rank comes last: "nccl_trace_rank_3",
            "hypercomm_watch_3.json".
        layout: The coordinates of ranks, where the dumps do not have them, or others are meant.

    Raises:
        DumpError: There is no such folder, no dump in it, two of one rank, or those of two jobs.
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
    place = Path(folder)
    try:
        files = sorted(entry for entry in place.iterdir() if entry.is_file())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DumpError(
            f"cannot read the folder {shown(str(folder))}: {why}; give the one that the ranks "
            f"wrote their dumps to"
        ) from None
    notes: list[str] = []
    was_enabled = gc.isenabled()
    gc.disable()  # thousands of small objects, none of them garbage
    try:
        found, unreadable = _read_files(files, notes)
    finally:
        if was_enabled:
            gc.enable()
    if not found:
        raise DumpError(_says_nothing(place, files, notes))
    by_source = {
        source: _by_rank([record for record in found if record.source == source])
        for source in ("watch", "flight recorder")
    }
    ranks, source = _merged(by_source["watch"], by_source["flight recorder"], notes)
    for rank, other in by_source["flight recorder"].items():
        if rank not in ranks:
            why = f"{other.file} is of torch's flight recorder, and the watch's are judged"
            unreadable.setdefault(rank, why)
    for records in by_source.values():
        _check_one_job(list(records.values()))
    unreadable = {rank: why for rank, why in unreadable.items() if rank not in ranks}
    size = _world_size(ranks, unreadable, layout)
    evidence = Evidence(ranks, size, source, unreadable, layout, notes)
    _check_versions(list(ranks.values()), notes)
    if layout is not None:
        _check_layout(layout, evidence)
    return evidence


def _says_nothing(place: Path, files: list[Path], notes: list[str]) -> str:
    what = f"{len(files)} files, none of them a dump" if files else "empty"
    first = f": {notes[0]}" if notes else ""
    return (
        f"the folder {shown(str(place))} is {what}{first}; a dump is what grid.watch() writes, or "
        f"torch's flight recorder, and its name ends with the rank: hypercomm_watch_3.json, "
        f"nccl_trace_rank_3"
    )


def _read_files(files: list[Path], notes: list[str]) -> tuple[list[RankRecord], dict[int, str]]:
    found, broken, ignored = [], [], []
    prefixes: set[str] = set()
    for file in files:
        match = _RANK.search(file.name)
        if match is None:
            ignored.append(file.name)
            continue
        before = file.name[: match.start()]
        try:
            found.append(_read_file(file, int(match[1])))
            prefixes.add(before)
        except _BROKEN as error:
            why = f"{file.name} cannot be read: {_why(error)}"
            broken.append((before, int(match[1]), why))
    unreadable = {}
    for before, rank, why in broken:
        notes.append(why)
        if before in prefixes or _USUAL.search(before):
            unreadable[rank] = why
        else:  # as "core.1"
            notes[-1] += "; no dump is named like it, so it is left out"
    if ignored:
        more = f" and {len(ignored) - _MOST_NAMED} more" if len(ignored) > _MOST_NAMED else ""
        names = ", ".join(ignored[:_MOST_NAMED])
        notes.append(f"left out, as the name does not end with a rank: {names}{more}")
    return found, unreadable


def _why(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"it has no field {error}, so it is no dump, or of another form"
    if isinstance(error, json.JSONDecodeError):
        return (
            f"it is cut off, or no dump: {error.msg.removesuffix(' at')} at character {error.pos}"
        )
    if isinstance(error, EOFError) or "truncated" in str(error):
        return f"it is cut off: {error}"
    return str(error) or type(error).__name__


def _read_file(file: Path, rank: int) -> RankRecord:
    content = file.read_bytes()
    if not content:
        raise ValueError("it is empty: its rank was ended while it wrote, or never did")
    is_json = content.lstrip()[:1] in {b"{", b"["}
    fields = json.loads(content) if is_json else flight_recorder.unpickle(content)
    if not isinstance(fields, Mapping):
        raise TypeError(f"it holds a {type(fields).__name__}, and a dump is a dict: it is none")
    if watched.MARK not in fields:
        return flight_recorder.read(fields, rank, file.name)
    record = watched.read(fields, file.name)
    if record.rank != rank:
        raise ValueError(f"its name says rank {rank}, and its content rank {record.rank}")
    return record


def _by_rank(records: list[RankRecord]) -> dict[int, RankRecord]:
    found: dict[int, RankRecord] = {}
    for record in sorted(records, key=lambda record: record.rank):
        first = found.setdefault(record.rank, record)
        if first is not record:
            raise DumpError(
                f"rank {record.rank} is there twice, in {first.file} and {record.file}; keep the "
                f"dumps of one hang"
            )
    return found


def _merged(
    watch: dict[int, RankRecord], recorder: dict[int, RankRecord], notes: list[str]
) -> tuple[dict[int, RankRecord], str]:
    if not recorder or watch.keys() - recorder.keys():
        if recorder:
            notes.append(
                f"torch's flight recorder has dumps of {len(recorder)} ranks, the watch of "
                f"{len(watch)}: the watch's are judged"
            )
        return watch, "watch"
    for rank, other in watch.items():
        own = recorder[rank]
        own.host, own.pid, own.place, own.why = other.host, other.pid, other.place, other.why
        own.layouts, own.world_size, own.job = other.layouts, other.world_size, other.job
    return recorder, "flight recorder"


def _first_that_differs(
    records: list[RankRecord], fact: Callable[[RankRecord], Any]
) -> tuple[RankRecord, RankRecord] | None:
    known = [record for record in records if fact(record)]
    return next(((known[0], each) for each in known[1:] if fact(each) != fact(known[0])), None)


def _check_one_job(records: list[RankRecord]) -> None:
    facts: tuple[Callable[[RankRecord], Any], ...]
    facts = (lambda record: record.world_size, lambda record: record.job)
    for fact in facts:
        if differ := _first_that_differs(records, fact):
            raise _two_jobs(*differ)
    worlds = {
        record.file: next((g.ranks for g, title in record.names.items() if title == WORLD), ())
        for record in records
    }
    if differ := _first_that_differs(records, lambda record: worlds[record.file]):
        raise _two_jobs(*differ)


def _two_jobs(one: RankRecord, other: RankRecord) -> DumpError:
    sizes = ["", ""]
    if one.world_size != other.world_size:
        sizes = [f" (of {record.world_size} ranks)" for record in (one, other)]
    return DumpError(
        f"{one.file}{sizes[0]} and {other.file}{sizes[1]} are of two jobs; keep the dumps of one "
        f"of them in the folder"
    )


def _check_versions(records: list[RankRecord], notes: list[str]) -> None:
    for what in sorted({what for record in records for what in record.versions}):
        found = Counter(r.versions[what] for r in records if what in r.versions)
        if len(found) < 2:
            continue
        usual = found.most_common(1)[0][0]
        odd = next(r for r in records if r.versions.get(what, usual) != usual)
        name = "form of the flight recorder" if what == "recorder" else what
        notes.append(
            f"dumps of several versions: {odd.file} has {name} {odd.versions[what]}, others "
            f"{usual}; ranks that run different versions may differ in what they call"
        )


def _world_size(
    ranks: Mapping[int, RankRecord], unreadable: Mapping[int, str], layout: RankLayout | None
) -> int:
    """The number of ranks, as a file says it; else as many as anything speaks of."""
    for record in ranks.values():
        if record.world_size:
            return record.world_size
        for group, title in record.names.items():
            if title == WORLD and group.ranks:
                return len(group.ranks)
    groups = {group for record in ranks.values() for group in record.names}
    largest = max((max(group.ranks) for group in groups if group.ranks), default=0)
    of_layout = layout.size + layout.rank_offset - 1 if layout is not None else 0
    return max(largest, of_layout, *ranks, *unreadable) + 1


def _check_layout(layout: RankLayout, evidence: Evidence) -> None:
    outside = [rank for rank in evidence.ranks if rank not in layout]
    if outside:
        raise WorldSizeError(
            f"--layout {layout} has {layout.size} ranks, and the dumps have ranks "
            f"{format_ranks(outside)} beyond it, of {evidence.world_size}; give the layout that "
            f"the job had"
        )
    if layout.size + layout.rank_offset > evidence.world_size:
        what = "WORLD has" if evidence.source == "watch" else "the dumps tell of"
        raise WorldSizeError(
            f"--layout {layout} has {layout.size} ranks, and {what} {evidence.world_size}; give "
            f"the layout that the job had"
        )
