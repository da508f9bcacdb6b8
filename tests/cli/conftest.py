"""How the command line is called without a process of its own, which takes half a second."""

import os
from types import SimpleNamespace

import pytest
from launched import rank_free

from hypercomm.cli import main


@pytest.fixture
def in_process(capsys, monkeypatch):
    """Call the command line here: what it returns, and prints."""
    for name in set(os.environ) - set(rank_free()):
        monkeypatch.delenv(name)

    def call(*arguments):
        code = main(arguments)
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return call
