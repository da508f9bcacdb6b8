"""Count which mistakes in how ranks agree the simulated job notices: all of them.

    python tests/protocol_mutants.py
    python tests/protocol_mutants.py --only meeting.py --jobs 4

A mutant is the library with one verb of the store deleted (its answer is what it would be if nobody
had written), doubled, or swapped with what stands beside it. The tests of the simulated job run on
each, the fastest first, until one fails. Nothing is changed in the tree that this lies in.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants import ROOT, Mutant

PLACES = (
    *("agreement/agreement.py", "agreement/driver.py", "agreement/meeting.py"),
    *("agreement/cards.py", "agreement/steps.py", "agreement/whereabouts.py"),
    *("owner.py", "creation.py", "job.py"),
)
VERBS = {"Exchange": "", "Read": "None", "Check": "False", "Publish": "None", "Delete": "None"}
"""What a meeting yields, and what it hears where nobody has written; of an exchange: its text."""
CALLS = {"exchange": "", "read": "None", "read_bytes": "None", "is_set": "False"}
CALLS |= {"set_all": "None", "forget": "None", "count_up": "0"}
OWN = {"give_up": "None", "_tell_connected": "None"}
TESTS = (
    "tests/process_groups/test_questions.py",
    "tests/process_groups/test_every_schedule.py",
    "tests/process_groups/test_protocol_faults.py",
    "tests/simulated_job/test_simulated_job.py",
)
MARKS = "not slow and not long"
QUIET = "ignore::pytest.PytestAssertRewriteWarning"
LIMIT_S = 120
EQUIVALENT = {
    ("publish_whereabouts", "set_all", "swapped"): "notes only what is to be said again later",
    ("_forget_before", "forget", "swapped"): "this rank notes what it has let go, before or after",
    ("arrive", "Delete", "swapped"): "what is raised while keys are removed is raised either way",
    ("_wait", "Check", "swapped"): "the clock is read before the question instead of after it",
}
"""By function, verb and kind: why nobody can notice."""


# ---- which mutants there are --------------------------------------------------------------------


def verb_of(node):
    """The name of a verb, and what stands in for its answer; None where a node is none."""
    if isinstance(node, ast.Yield) and isinstance(node.value, ast.Call):
        name = getattr(node.value.func, "id", "")
        return (name, VERBS[name], node.value) if name in VERBS else None
    if isinstance(node, ast.Call):
        of = node.func
        if isinstance(of, ast.Attribute) and getattr(of.value, "id", "") == "c10d":
            return (of.attr, CALLS[of.attr], node) if of.attr in CALLS else None
        name = getattr(of, "id", "")
        return (name, OWN[name], node) if name in OWN else None
    return None


def verbs_in(tree):
    """Every verb, with the function around it and the statements that it is in, the inmost last."""

    def walk(node, function, blocks):
        if verb_of(node):
            yield node, function, blocks
        for field, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            is_block = field in {"body", "orelse", "finalbody"} and isinstance(value, list)
            for at, child in enumerate(children):
                if not isinstance(child, ast.AST):
                    continue
                inside = (*blocks, (children, at)) if is_block else blocks
                name = function
                if isinstance(child, ast.FunctionDef):
                    name, inside = f"{function}.{child.name}".lstrip("."), ()
                yield from walk(child, name, inside)

    yield from walk(tree, "", ())


def mutants_in(path):
    """Every mutant of a file, with its function and verb."""
    source = path.read_bytes()
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def span(first, last=None):
        last = last or first
        start = begins[first.lineno - 1] + first.col_offset
        return start, begins[last.end_lineno - 1] + last.end_col_offset

    def text_of(node):
        start, end = span(node)
        return source[start:end].decode()

    file = str(path.relative_to(ROOT))
    for node, function, blocks in verbs_in(ast.parse(source)):
        name, neutral, call = verb_of(node)
        own, at = text_of(node), (file, node.lineno, *span(node))
        instead = neutral or f"({text_of(call.args[2])})"
        yield Mutant(*at, "deleted", instead), function, name
        yield Mutant(*at, "doubled", f"(({own}), ({own}))[1]"), function, name
        for statements, number in reversed(blocks):
            if len(statements) > 1:
                first = min(number, len(statements) - 2)
                one, other = statements[first : first + 2]
                gap = "\n" + " " * one.col_offset
                both = text_of(other) + gap + text_of(one)
                yield Mutant(file, node.lineno, *span(one, other), "swapped", both), function, name
                break


def every_mutant(only):
    """All of them, each once; swaps that mean one thing count as one."""
    found = {}
    for place in PLACES:
        path = ROOT / "hypercomm" / "process_groups" / place
        for mutant, function, name in mutants_in(path):
            key = mutant.file, mutant.start, mutant.end, mutant.text
            if only in str(path):
                found.setdefault(key, (mutant, function, name))
    return list(found.values())


# ---- one of them --------------------------------------------------------------------------------


class First:
    """As a plugin of pytest: the first test that fails."""

    failed = ""

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.failed:
            self.failed = report.nodeid.rpartition("/")[2]

    def pytest_collectreport(self, report):
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid}, which cannot be collected"


def run_tests(tree, tests):
    """Run tests on the library of a tree, in a fork that has loaded what it needs; who failed."""
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        os.close(told)
        sys.path.insert(0, str(tree))
        os.chdir(ROOT)
        silent = os.open(tree / "log", os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(silent, 1), os.dup2(silent, 2)
        first, code = First(), 1
        try:
            import hypothesis
            import pytest

            hypothesis.configuration.set_hypothesis_home_dir(tree / "examples")
            options = ["-q", "-x", "-m", MARKS, "--hypothesis-seed=0", "--tb=no"]
            plain = ["-p", "no:cacheprovider", "-p", "no:xdist", "-W", QUIET]
            code = pytest.main([*options, *plain, *tests], plugins=[first])
            import hypercomm

            if not hypercomm.__file__.startswith(str(tree)):
                code, first.failed = 3, "it ran on another library"
        except BaseException:  # noqa: BLE001 - pytest itself has failed
            traceback.print_exc()
            first.failed = "the run of pytest itself"
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os.write(tell, json.dumps([int(code), first.failed]).encode())
            os._exit(0)
    os.close(tell)
    deadline, words = time.monotonic() + LIMIT_S, b""
    with contextlib.closing(io.FileIO(told)) as reader:
        os.set_blocking(told, False)
        while time.monotonic() < deadline:
            found = reader.read(1000)
            if found == b"":
                break
            words += found or b""
            time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    code, failed = json.loads(words) if words else (1, "it hangs")
    if code not in {0, 1, 2}:
        raise RuntimeError(f"pytest ended with {code}, {failed}: {(tree / 'log').read_text()}")
    if code and not failed:
        print((tree / "log").read_text()[-3000:])
    return failed or ("it ended" if code else None)


def judge(scratch, number, mutant, tests):
    """Which test notices a mutant, None: none does; and how long that took."""
    tree, begin = scratch / f"{number}", time.monotonic()
    shutil.copytree(ROOT / "hypercomm", tree / "hypercomm")
    if mutant is not None:
        source = (tree / mutant.file).read_bytes()
        (tree / mutant.file).write_bytes(mutant.applied(source))
    try:
        return run_tests(tree, tests), time.monotonic() - begin
    finally:
        shutil.rmtree(tree)


def preload():
    """Load what all tests need, and nothing of this library."""
    import hypothesis.strategies
    import numpy as np
    import pytest
    import torch.distributed

    return hypothesis, np, pytest, torch


def main():
    """Judge every mutant; print the table, and those that nobody notices."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="files whose name has this in it")
    parser.add_argument("--lines", type=int, nargs="*", help="lines of them")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    options = parser.parse_args()
    mutants = every_mutant(options.only)
    if options.lines:
        mutants = [one for one in mutants if one[0].line in options.lines]
    tests = [test for test in TESTS if (ROOT / test).exists()]
    preload()
    survivors, judged, begin = 0, Counter(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="protocol-mutants-") as folder:
        scratch = Path(folder)
        failed, took_s = judge(scratch, "none", None, tests)
        if failed is not None:
            raise RuntimeError(f"without a mutant {failed} fails")
        print(f"{len(mutants)} mutants; the tests take {took_s:.0f} s", flush=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            told = pool.map(
                lambda at: judge(scratch, at, mutants[at][0], tests), range(len(mutants))
            )
            for (mutant, function, verb), (failed, took_s) in zip(mutants, told, strict=True):
                why = EQUIVALENT.get((function, verb, mutant.kind))
                how = failed or (f"equivalent: {why}" if why else "NOBODY NOTICES")
                is_open = failed is None and why is None
                survivors += is_open
                judged["killed" if failed else "open" if is_open else "equivalent"] += 1
                place = f"{mutant.file.partition('process_groups/')[2]}:{mutant.line}"
                told_of = f"{place:32} {function[-30:]:30} {verb:15} {mutant.kind:8}"
                print(f"{told_of} {took_s:5.1f} s  {how}", flush=True)
    print(f"{dict(judged)} in {time.monotonic() - begin:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
