"""What tests of topologies have in common."""

import pytest


@pytest.fixture
def file(tmp_path):
    """Write a file, and say where it is."""

    def write(name, text):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write
