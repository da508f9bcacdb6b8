"""Run the calls of wrong_calls.toml. Each raises its error, and what the error advises works.

An entry has the `call`, the class of the `error`, and the fragments that the message `says`. In
`advice`, a call that works, the message contains each text between << and >>. `setup` runs first.
"""

import contextlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from hypercomm import errors

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PYTHON_ARGUMENTS = re.compile(
    r"\b(world_size|overlapped|traffic=|weights=|groups=|on=|force=|along=|nprocs=|RankLayout)"
)


def entries(*kinds):
    """Return the entries of some kinds, with the marked texts of the advice added to `says`."""
    found = []
    for kind in kinds:
        for given in TABLE[kind]:
            marked = given.get("advice", "")
            entry = {
                "kind": kind,
                "call": given["call"],
                "error": given.get("error"),
                "says": given["says"] + re.findall("<<(.+?)>>", marked),
                "setup": given.get("setup", ""),
                "advice": re.sub("<<|>>", "", marked),
            }
            needs_torch = given.get("torch", kind in {"torch", "grid"})
            marks = () if needs_torch else pytest.mark.torch_free
            found.append(pytest.param(entry, id=entry["call"][:80], marks=marks))
    return found


@contextlib.contextmanager
def names_for(kind):
    """Run the imports of a kind of entries, and return the names that its calls use."""
    names = {}
    exec(TABLE["names"]["plain"], names)
    with contextlib.ExitStack() as stack:
        if kind != "plain":
            exec(TABLE["names"]["torch"], names)
        if kind == "grid":
            stack.enter_context(names["fake_world"](8, rank=5))
            names["grid"] = stack.enter_context(names["HyperCommGrid"]("tp=2,cp=2,dp=2"))
            names["grid"].create_pg("dp")
        yield names


def state_of(grid):
    """Return the groups that torch has registered, and the groups and the views of a grid."""
    from group_checks import tables

    return tables(), dict(grid.pgs), dict(grid.views)


# A call that raises changes nothing, and what its message advises works in its place.
@pytest.mark.parametrize("entry", entries("plain", "torch", "grid"))
def test_python(entry, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK", "HYPERCOMM_LAYOUT"):
        monkeypatch.delenv(name, raising=False)
    with names_for(entry["kind"]) as names:
        exec(entry["setup"], names)
        grid = names.get("grid")
        before = grid and state_of(grid)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - its class is compared below
            eval(entry["call"], names)
        message = str(caught.value)
        assert type(caught.value).__name__ == entry["error"], message
        assert [part for part in entry["says"] if part not in message] == [], message
        assert len(message) < 1000
        assert message.replace("\n", "").isprintable()
        if grid and not grid.is_destroyed:
            assert state_of(grid) == before
            assert grid.create_pg("tp").size() == 2
    if entry["advice"]:
        with names_for(entry["kind"]) as names:
            exec(entry["setup"], names)
            eval(entry["advice"], names)


# A wrong command line has exit code 2 and changes no file. What its message advises works.
@pytest.mark.parametrize("entry", entries("command"))
def test_command(entry, in_process, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, text in TABLE["files"].items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    before = {path: path.is_file() and path.read_text() for path in tmp_path.iterdir()}
    done = in_process(*shlex.split(entry["call"]))
    message = " ".join(done.stderr.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert [part for part in entry["says"] if part not in message] == [], message
    assert "Traceback" not in message
    assert PYTHON_ARGUMENTS.search(message) is None
    assert before == {path: path.is_file() and path.read_text() for path in tmp_path.iterdir()}
    if entry["advice"]:
        done = in_process(*shlex.split(entry["advice"]))
        assert (done.returncode, done.stderr) == (0, "")


# Legacy code catches builtin types. Therefore errors of layouts are ValueErrors, and errors of
# groups are KeyErrors.
def test_builtin_bases():
    assert issubclass(errors.LayoutError, ValueError)
    assert issubclass(errors.RankOutsideError, ValueError)
    assert issubclass(errors.WorldSizeError, ValueError)
    assert issubclass(errors.GroupExistsError, KeyError)
    assert issubclass(errors.GroupMissingError, KeyError)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.HyperCommError)
    assert str(errors.GroupMissingError("a sentence")) == "a sentence"  # KeyError's str() is a repr
