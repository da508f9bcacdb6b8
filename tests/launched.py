"""The environment of a process that no launcher has started."""

import os

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "PMI", "PET_")


def rank_free():
    """The environment without what launchers leave in it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
