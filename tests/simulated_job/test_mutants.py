"""Mistakes in how ranks agree, put in one after the other: the tests of this folder notice each."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = ["hypercomm/process_groups/agreement/*.py", "hypercomm/launch/worlds.py"]

MUTANTS = {
    "a round is ended without a look at how it has ended": (
        "        if found is not None:\n            return found\n",
        "        if found is not None:\n            return outcome\n",
    ),
    "the last rank does not end the round": (
        "    if (yield Add(ticket.count)) < size:\n",
        "    if (yield Add(ticket.count)) <= size:\n",
    ),
    "one rank is not waited for": (
        "    if (yield Add(ticket.count)) < size:\n",
        "    if (yield Add(ticket.count)) < size - 1:\n",
    ),
    "a rank counts itself twice": (
        "    if (yield Add(ticket.count)) < size:\n",
        "    yield Add(ticket.count)\n    if (yield Add(ticket.count)) < size:\n",
    ),
    "ranks that have arrived do not say so": (
        '        self._perform(protocol.Append(ticket.arrivals, f"{world.rank},"))\n',
        "",
    ),
    "ranks that have finished do not say so": (
        '    yield Append(ticket.arrivals, f"{rank}+,")\n',
        "",
    ),
    "a rank that arrives later does not hear of a failure": (
        '            if outcome is not None and outcome.kind in ("differs", "failed"):\n',
        "            if False:\n",
    ),
    "a failure is heard again and again": (
        "            self.scope.leave(self._ticket.round)\n",
        "            pass\n",
    ),
    "the next round has the number of the last one": (
        "            self.round + 1, first, failed=",
        "            self.round, first, failed=",
    ),
    "proposals are not compared": (
        "    if own.entries == first.entries:\n",
        "    if True:\n",
    ),
    "a refusal ends nothing": (
        '        yield from decide(ticket, Outcome("failed", proposal.refusal))\n',
        "        pass\n",
    ),
    "a late rank ends a round of others": (
        "        if ticket.record.first == self._proposal:\n",
        "        if True:\n",
    ),
    "ranks that wait do not say so": (
        "status_key(world.namespace, world.rank), own.text()",
        "status_key(world.namespace, -1), own.text()",
    ),
    "a circle is not ended elsewhere": (
        "                self._end_elsewhere(status, outcome)\n",
        "                pass\n",
    ),
    "what a failed call has made stays": (
        "                undo()\n            except Exception",
        "                pass\n            except Exception",
    ),
    "keys of ended rounds stay": (
        "            yield Delete([old.arrivals, old.count])\n",
        "            pass\n",
    ),
    "an interrupted rank does not tell the others": (
        "            if self._is_interrupted:\n                raise _InterruptedError\n",
        "",
    ),
    "a rank that joins again does not end the round of its former process": (
        '    yield from protocol.decide(ticket, Outcome("restarted", f"{me} has begun again"))\n',
        "",
    ),
    "a rank that joins again leaves the round that it was in": (
        '    yield from protocol.decide(ticket, Outcome("restarted", f"{me} has begun again"))\n',
        "",
    ),
    "worlds of other names are not looked at": (
        "        if other is None or not (",
        "        if True or not (",
    ),
    "calls in a joined world do not hear that a rank has joined again": (
        "        if record is None or record.round <= self.incarnation:\n",
        "        if True:\n",
    ),
    "a process that has been replaced joins again": (
        "        if held != world._claim:\n",
        "        if False:\n",
    ),
    "keys of former incarnations stay": (
        "            world.store.delete_key(key)\n",
        "            pass\n",
    ),
}


# Each mistake fails a test that runs by default; without one, none fails.
@pytest.mark.slow
@pytest.mark.parametrize("name", [None, *MUTANTS])
def test_a_mistake_is_noticed(tmp_path, name):
    shutil.copytree(ROOT / "hypercomm", tmp_path / "hypercomm")
    if name is not None:
        old, new = MUTANTS[name]
        paths = [path for place in PLACES for path in tmp_path.glob(place)]
        (path,) = [path for path in paths if old in path.read_text()]
        text = path.read_text()
        assert text.count(old) == 1, "the source has changed: adapt the mutant"
        path.write_text(text.replace(old, new))
    plain = ["-q", "-x", "--tb=no", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}"}
    try:
        code = subprocess.run(
            [sys.executable, "-m", "pytest", *plain, str(Path(__file__).parent)],
            cwd=tmp_path,
            env=environment,
            timeout=300,
            check=False,
            stdout=subprocess.DEVNULL,
        ).returncode
    except subprocess.TimeoutExpired:
        code = 1
    assert (code == 0) == (name is None)
