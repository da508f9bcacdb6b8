"""Fixtures of the tests of machines and placement."""

import os
from types import SimpleNamespace

import pytest

from hypercomm.cli import main
from hypercomm.launch.launchers import VARIABLES


@pytest.fixture
def file(tmp_path):
    """Write a file and return its path."""

    def write(name, text):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture
def in_process(capsys, monkeypatch):
    """Call the command line in this process; return its exit code and output."""
    for name in VARIABLES & os.environ.keys():
        monkeypatch.delenv(name)

    def call(*arguments):
        code = main(arguments)
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return call
