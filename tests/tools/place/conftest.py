"""Fixtures of the tests of machines and placement."""

import pytest


@pytest.fixture
def file(tmp_path):
    """Write a file and return its path."""

    def write(name, text):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write
