"""Who says what is wrong: of many ranks that were started with the same call, the first."""

from __future__ import annotations

import os
import time

from hypercomm.errors import LaunchError
from hypercomm.launch.launchers import find_job

_GRACE_S = 3.0
"""How long rank 0 has to say it, before the end of another rank makes the launcher end it."""


class HereError(LaunchError):
    """Something is wrong on this host, and perhaps not on others: mend the host."""


def leave_it_to_another(error: Exception) -> bool:
    """Tell whether another rank says the same; it is given the time to do so."""
    try:
        job = find_job(os.environ)
    except LaunchError:
        return False
    if job is None or job.rank == 0:
        return False
    if isinstance(error, HereError) and not job.local_rank:
        return False
    time.sleep(_GRACE_S)
    return True
