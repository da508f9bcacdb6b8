"""Compare the layouts of public files with those that were read from them by hand.

    python tests/tools/launch_files/held_out.py FOLDER

FOLDER has a checkout of each repository of `held_out.toml`, named OWNER+NAME.
"""

import collections
import re
import sys
from pathlib import Path

from launch_inputs import load

from hypercomm import read_config
from hypercomm.errors import HyperCommError

NOTES = "is ignored|is taken from"
"""Problems about a layout that is right as it is shown."""


def verdict(row, file):
    """Return "right", "refused" or "wrong", and what the reader found."""
    try:
        config = read_config(file, row.get("given"))
    except HyperCommError as error:
        return "right" if "refused" in row else "refused", str(error)
    problems = [one for one in config.problems if not re.search(NOTES, one)]
    if problems:
        return "right" if "refused" in row else "refused", "; ".join(problems)
    if "refused" in row:
        return "wrong", str(config.layouts)
    layouts = {re.sub(r"@[\d#]+", "", name): str(one) for name, one in config.layouts.items()}
    is_right = row["layouts"].items() <= layouts.items()
    is_right = is_right and row.get("ranks") in (None, config.world_size)
    return "right" if is_right else "wrong", f"{layouts}, {config.world_size} ranks"


if __name__ == "__main__":
    found = collections.Counter()
    for row in load("held_out.toml")["file"]:
        file = Path(sys.argv[1], row["repository"].replace("/", "+"), row["path"])
        result, why = verdict(row, file)
        found[result] += 1
        if result != "right":
            print(f"{result}: {row['repository']} {row['path']}\n    {why}")
    print(dict(found))
