"""Count which small mistakes in the library the tests notice.

    python tests/mutants.py --count 120 --seed 1
    python tests/mutants.py --count 120 --seed 1 --beside <commit>   # and what its tests noticed

A mutant is the library with a line deleted, a condition inverted, or a number that is one too
large, inside a function. All of them are first marked in one copy of the tree, in which every test
runs once: it says which tests come past which mutant, in whatever process. Then each mutant is
made in a copy of its own, and these tests run on it, the fastest first, until one fails, and
fails again by itself. Nothing is changed in the tree that this lies in.
Tests marked `alone`, which ask for speed, take no part.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("layout", "process_groups", "grid", "compat")
LANES = ("quick", "default", "all")
"""From the fewest tests to all of them: what one notices, the next ones do, too."""
KINDS = ("deleted", "inverted", "off by one")
SIMPLE = (ast.Assign, ast.AugAssign, ast.Delete, ast.Expr, ast.Raise, ast.Return)
CONTROLS = 500
"""Tests that must pass where no mistake was made, before any judgement counts."""
UNMARKED = "quick", "slow", "clients", "alone"


# ---- in the processes of the tests --------------------------------------------------------------

_seen = set()


def hit(number):
    """Note that the test that runs now has come past a mutant; False, to stand before an `or`."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if (number, test, os.getpid()) not in _seen and "MUTANTS_HITS" in os.environ:
        _seen.add((number, test, os.getpid()))
        with open(os.environ["MUTANTS_HITS"], "a") as file:  # noqa: PTH123 - light to import
            file.write(json.dumps([number, test]) + "\n")
    return False


def pytest_runtest_logreport(report):
    """As a plugin of pytest: note what each test took, and whether it passed."""
    if (report.when == "call" or report.failed) and "MUTANTS_TESTS" in os.environ:
        marks = [name for name in UNMARKED if name in report.keywords]
        line = [report.nodeid, report.outcome == "passed", report.duration, marks]
        with open(os.environ["MUTANTS_TESTS"], "a") as file:  # noqa: PTH123
            file.write(json.dumps(line) + "\n")


def pytest_collection_modifyitems(items):
    """As a plugin of pytest: run the tests that are asked for, in that order."""
    if "MUTANTS_ONLY" in os.environ:
        place = {
            test: at
            for at, test in enumerate(json.loads(Path(os.environ["MUTANTS_ONLY"]).read_text()))
        }
        items[:] = sorted(
            (item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid]
        )


# ---- which mutants there are --------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One small mistake: where it is, and what stands there instead."""

    file: str
    line: int
    start: int  # bytes from the beginning of the file
    end: int
    kind: str
    text: str

    def applied(self, source):
        """Make the mistake in the bytes of its file."""
        return source[: self.start] + self.text.encode() + source[self.end :]


CALL = "__import__('mutants').hit({})"
MARKS = {"deleted": (CALL + "; ", ""), "inverted": (f"({CALL} or (", "))")}
MARKS["off by one"] = (f"({CALL} or ", ")")


def marked(source, numbered):
    """Put marks into the bytes of a file, also where one mutant lies inside another."""
    pieces = []
    for number, mutant in numbered:
        before, behind = (mark.format(number) for mark in MARKS[mutant.kind])
        pieces.append((mutant.start, 1, -mutant.end, before))
        pieces.append((mutant.end, 0, -mutant.start, behind))
    for at, *_, text in sorted(pieces, reverse=True):
        source = source[:at] + text.encode() + source[at:]
    return source


def is_function(node):
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def mistakes(node, inside):
    """Every node in a tree that can be wrong, with the kind, and what is put in its place."""
    if isinstance(node, (ast.JoinedStr, ast.Match)):  # where no call can stand everywhere
        return
    if inside:
        yield from mistakes_of(node)
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "type_params"}:
            continue
        is_inside = inside or (is_function(node) and name == "body")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from mistakes(child, is_inside)


def mistakes_of(node):
    """Those of one node."""
    test = getattr(node, "test", None)
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if isinstance(node, SIMPLE) and not is_text:
        yield node, "deleted", "pass"
    if isinstance(test, ast.expr):
        yield test, "inverted", "(not (%))"
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, "off by one", str(node.value + 1)


def mutants_of(path):
    """Every mutant of a file, in the order of its lines."""
    source = path.read_bytes()
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    file = str(path.relative_to(ROOT))
    for node, kind, text in mistakes(ast.parse(source), inside=False):
        start = begins[node.lineno - 1] + node.col_offset
        end = begins[node.end_lineno - 1] + node.end_col_offset
        own = source[start:end].decode()
        yield Mutant(file, node.lineno, start, end, kind, text.replace("%", own))


def drawn(count, seed):
    """As many mutants of each kind, drawn by a seed; no two on one line of a file."""
    found = defaultdict(list)
    for room in ROOMS:
        for path in sorted((ROOT / "hypercomm" / room).rglob("*.py")):
            for mutant in mutants_of(path):
                found[mutant.kind].append(mutant)
    chance, taken = random.Random(seed), {}
    for at in range(count):
        kind = KINDS[at % len(KINDS)]
        while True:
            mutant = chance.choice(found[kind])
            if (mutant.file, mutant.line) not in taken:
                taken[mutant.file, mutant.line] = mutant
                break
    return sorted(taken.values(), key=lambda mutant: (mutant.file, mutant.line))


# ---- trees, and tests that run in them ----------------------------------------------------------


def said_by(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout


def tree_of(folder, commit=None):
    """A copy of this tree, or of another commit's with this one's library."""
    folder.mkdir(parents=True)
    names = ["hypercomm"]
    if commit is None:
        files = said_by("git", "ls-files", "--cached", "--others", "--exclude-standard").decode()
        names = sorted({file.partition("/")[0] for file in files.splitlines()})
    else:
        archive = said_by("git", "archive", commit)
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        shutil.rmtree(folder / "hypercomm")
        shutil.copy(ROOT / "tests" / "mutants.py", folder / "tests")
    for name in names:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


def environment(tree, **more):
    path = os.pathsep.join([str(tree), str(tree / "tests")])
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MUTANTS_")}
    # One hash seed: the names of some tests have a set in them.
    return {
        **plain,
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        **more,
    }


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def unreadable(tree):
    """Files of tests that cannot be collected: another commit's may ask for what is gone."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
        env=environment(tree),
    )
    lines = (line.split() for line in done.stdout.splitlines() if line.startswith("ERROR "))
    return sorted({words[1] for words in lines})


def survey(tree, mutants, marks, workers):
    """Run every test once past the marks; by mutant its tests, and of each test what is known."""
    by_file = defaultdict(list)
    for number, mutant in enumerate(mutants):
        by_file[mutant.file].append((number, mutant))
    for file, numbered in by_file.items():
        (tree / file).write_bytes(marked((tree / file).read_bytes(), numbered))
    hits, tests = tree / "hits.jsonl", tree / "tests.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants", "-p", "no:cacheprovider"]
    command += [] if marks is None else ["-m", marks]
    command += ["-n", str(workers), "--dist", "worksteal"] if workers else ["-p", "no:xdist"]
    command += [f"--ignore={file}" for file in unreadable(tree)]
    with (tree / "survey.log").open("w") as log:
        subprocess.run(
            command,
            cwd=tree,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
            env=environment(tree, MUTANTS_HITS=str(hits), MUTANTS_TESTS=str(tests)),
        )
    known = {test: (took, marks) for test, passed, took, marks in lines_of(tests) if passed}
    reached = defaultdict(set)
    for number, test in lines_of(hits):
        reached[number].add(test)
    return reached, known


def lane_of(marks):
    """The smallest lane that a test is in, by its marks."""
    if "quick" in marks:
        return "quick"
    return "all" if {"slow", "clients"} & set(marks) else "default"


def notices(tree, tests, expected_s):
    """The first of some tests that fails in a tree, or None; a run that hangs has failed."""
    if not tests:
        return None
    only = tree / "only.json"
    only.write_text(json.dumps(tests))
    (tree / "done.jsonl").unlink(missing_ok=True)
    files = sorted({test.partition("::")[0] for test in tests})
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "mutants", "-m", ""]
    command += ["-p", "no:cacheprovider", *(["-p", "no:xdist"]), *files]
    with (tree / "run.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=tree,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment(tree, MUTANTS_ONLY=str(only), MUTANTS_TESTS=str(tree / "done.jsonl")),
        )
        try:
            code = process.wait(60 + 4 * expected_s)
        except subprocess.TimeoutExpired:
            code = "it hangs"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    failed = [test for test, passed, _, _ in lines_of(tree / "done.jsonl") if not passed]
    if code == 0:
        return None
    if code == 5:
        raise RuntimeError(f"no test was found: {tree / 'run.log'}")
    return failed[0] if failed else f"exit code {code}"


def judge(folder, number, mutant, reached, known, commit, budget_s):
    """The lane whose tests notice a mutant, and which; None if none does, "" if none comes past."""
    here = [test for test in reached if test in known]
    if "" in reached:  # where a process had lost the name of its test, it may be any
        here = list(known)
    if not here:
        return "", "", 0.0
    tree, begin = tree_of(folder / f"{number}", commit), time.monotonic()
    (tree / mutant.file).write_bytes(mutant.applied((tree / mutant.file).read_bytes()))
    try:
        for lane in LANES:
            tests = sorted(
                (test for test in here if lane_of(known[test][1]) == lane),
                key=lambda test: known[test][0],
            )
            expected_s = sum(known[test][0] for test in tests)
            if expected_s > budget_s:
                return "?", f"{len(tests)} tests of {lane} would take {expected_s:.0f} s", 0.0
            while (failed := notices(tree, tests, expected_s)) is not None:
                if failed not in tests or notices(tree, [failed], expected_s) is not None:
                    return lane, failed, time.monotonic() - begin
                tests.remove(failed)  # a busy machine had failed it, not the mutant
        return None, f"{len(here)} tests", time.monotonic() - begin
    finally:
        shutil.rmtree(tree)


def measure(name, scratch, mutants, options, commit=None):
    """One row of judgements, by mutant; told as they come."""
    folder = scratch / name
    begin = time.monotonic()
    marks = "not alone" + " and not slow and not clients" * options.fast
    marks = marks if commit is None else None  # others have marks of their own
    workers = options.workers if commit is None else 0  # others may list their tests unlike
    reached, known = survey(tree_of(folder / "marked", commit), mutants, marks, workers)
    if not known:
        raise RuntimeError(f"no test passed: {folder / 'marked' / 'survey.log'}")
    print(f"{name}: {len(known)} tests passed in {time.monotonic() - begin:.0f} s", flush=True)

    control = tree_of(folder / "control", commit)  # no mistake, so nothing may be noticed
    some = sorted(known, key=lambda test: known[test][0])[:CONTROLS]
    if (failed := notices(control, some, sum(known[test][0] for test in some))) is not None:
        raise RuntimeError(f"without a mutant {failed} fails: {control / 'run.log'}")

    def one(number):
        told = judge(
            folder, number, mutants[number], reached[number], known, commit, options.budget
        )
        mutant = mutants[number]
        print(f"{name} {mutant.file}:{mutant.line} {mutant.kind}: {told}", flush=True)
        return told

    with ThreadPoolExecutor(options.jobs) as pool:
        return list(pool.map(one, range(len(mutants))))


def table(mutants, judgements):
    """How many mutants the tests of each lane notice, by room and kind."""
    rows = [["mutants", "drawn", *judgements]]
    for what in (*ROOMS, *KINDS, "all"):
        those = [
            at
            for at, mutant in enumerate(mutants)
            if what in {mutant.file.split("/")[1], mutant.kind, "all"}
        ]
        rows.append([what, str(len(those))])
        rows[-1] += [str(sum(found[at] for at in those)) for found in judgements.values()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main():
    """Draw, survey, judge; print the table, and every mutant that was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--count", type=int, default=120, help="mutants; at least 100 say something"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--beside", metavar="COMMIT", help="tests of another commit to compare with"
    )
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--workers", type=int, default=4, help="workers of the first run")
    parser.add_argument(
        "--budget",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="leave open a mutant whose tests of a lane would take longer",
    )
    parser.add_argument("--fast", action="store_true", help="without the lanes slow and clients")
    parser.add_argument("--out", type=Path, help="a JSON file for every judgement")
    options = parser.parse_args()
    mutants = drawn(options.count, options.seed)
    for mutant in mutants:  # a mutant that is no Python would be noticed by anything
        compile(mutant.applied((ROOT / mutant.file).read_bytes()), mutant.file, "exec")
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        told = {"these": measure("these", Path(scratch), mutants, options)}
        if options.beside:
            told["those"] = measure("those", Path(scratch), mutants, options, options.beside)
    lanes = [lane for lane, _, _ in told["these"]]
    judgements = {
        "reached": [lane != "" for lane in lanes],
        **{
            f"by {lane}": [found in LANES[: place + 1] for found in lanes]
            for place, lane in enumerate(LANES)
        },
    }
    if options.beside:
        judgements[f"by {options.beside[:7]}"] = [lane in LANES for lane, _, _ in told["those"]]
    print(table(mutants, judgements))
    print(Counter("open" if lane == "?" else "judged" for lane in lanes))
    for mutant, (lane, why, _) in zip(mutants, told["these"], strict=True):
        if lane not in LANES:
            print(f"not noticed: {mutant.file}:{mutant.line} {mutant.kind} ({lane!r}, {why})")
    if options.out:
        rows = [
            {
                "file": mutant.file,
                "line": mutant.line,
                "kind": mutant.kind,
                **{name: list(all_told[at]) for name, all_told in told.items()},
            }
            for at, mutant in enumerate(mutants)
        ]
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
