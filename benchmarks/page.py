"""Updates README.md and results.json: measured tables are replaced, and other tables stay."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from measure import as_text

Report = dict[str, Any]
Rows = list[dict[str, Any]]

BEGIN, END = "<!-- the table, by python benchmarks --merge -->", "<!-- end -->"

_LATER = "Measured later, on {date}, torch {torch}, at {commit}, load {load_before:.1f}: {what}."

_LEFT_OUT = re.compile("get_|is_")
"""Matches the rows of single getters, which are too many for a page."""


def merged(report: Report, rows: Rows, told: dict[str, Any]) -> Report:
    """Return a report in which new tables replace old ones of the same name, or are appended.

    Args:
        report: The content of results.json.
        rows: All rows of the tables that were measured now.
        told: The machine that measured these rows. It is noted with the names of their tables.
    """
    new: dict[str, Rows] = {}
    for row in rows:
        new.setdefault(row["what"], []).append(row)
    left, kept = dict(new), []
    for row in report["rows"]:
        if row["what"] not in new:
            kept.append(row)
        else:
            kept += left.pop(row["what"], [])
    kept += [row for table in left.values() for row in table]
    later = [
        {**one, "tables": [what for what in one["tables"] if what not in new]}
        for one in report.get("later", [])
    ]
    later = [*(one for one in later if one["tables"]), {**told, "tables": [*new]}]
    return {"machine": report["machine"], "later": later, "rows": kept}


def shown(report: Report) -> str:
    """Return a report as the part of the page from the first mark to the second."""
    rows = [row for row in report["rows"] if not _LEFT_OUT.match(row["what"])]
    lines = [BEGIN, "```", as_text(rows), "```"]
    for one in report.get("later", []):
        lines += [
            "",
            _LATER.format(**one, what="; ".join(one["tables"])),
        ]
    return "\n".join([*lines, END])


def read(folder: Path) -> tuple[Report, str, str]:
    """Return the report in results.json, and the text of README.md before and after the table.

    Raises:
        SystemExit: A file is missing, or the page lacks the marks around the table.
    """
    results, page = folder / "results.json", folder / "README.md"
    try:
        report, text = json.loads(results.read_text()), page.read_text()
    except (OSError, ValueError) as error:
        raise SystemExit(f"--merge needs {results} and {page}: {error}") from None
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page} has no lines {BEGIN!r} and {END!r}, between which the table goes")
    return report, before, after


def write(folder: Path, rows: Rows, told: dict[str, Any]) -> None:
    """Write tables into results.json and README.md of a folder.

    Raises:
        SystemExit: A file is missing, or the page lacks the marks. Nothing was written.
    """
    report, before, after = read(folder)
    report = merged(report, rows, told)
    (folder / "README.md").write_text(f"{before}{shown(report)}{after}")
    (folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
