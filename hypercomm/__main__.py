"""`python -m hypercomm`, for where no script is on the path: under torchrun, say."""

import sys

from hypercomm.cli import main

if __name__ == "__main__":
    sys.exit(main())
