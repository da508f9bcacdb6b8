"""Loads the launch files of the tests: their texts in words of our own, and the sizes in them."""

import re
import sys
from pathlib import Path

from hypercomm import read_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TORCHRUN = "torchrun --nproc-per-node 8 train.py --tensor-model-parallel-size"


def load(name):
    """Return the content of a TOML file in this folder."""
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


def read(row, folder, text=None):
    """Read the text of a row as a file, or as a text if the row has no file, or another text."""
    text = (row["text"] if text is None else text).replace("TORCHRUN", TORCHRUN)
    for name, content in row.get("files", {}).items():
        (folder / name).write_text(content)
    name = row.get("file") or row.get("path", "").rpartition("/")[2].replace(".md", ".sh")
    if name:
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return read_config(file if name else text, row.get("given"), variables=row.get("variables", {}))


def layouts_of(config):
    """Return the layouts of a configuration as texts, by name with and without the line."""
    texts = {name: str(layout) for name, layout in config.layouts.items()}
    return {re.sub(r"@[\d#]+", "", name): text for name, text in texts.items()} | texts
