"""The entry point of the command `hypercomm`, and of `python -m hypercomm` under torchrun."""

import importlib.util
import sys


def main() -> int:
    """Run the command line, if its packages are installed, and return the exit code."""
    lacking = [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]
    if lacking:
        needed = " and ".join(lacking)
        message = f"hypercomm: the command line needs {needed}: pip install {' '.join(lacking)}\n"
        sys.stderr.write(message)
        return 2
    from hypercomm.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
