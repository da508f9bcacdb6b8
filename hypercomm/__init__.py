"""hypercomm: an object-oriented, N-dimensional communication grid for torch.distributed.

Names resolve on first use, so planning with `RankLayout` never loads torch. Errors are here, too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hypercomm import errors
from hypercomm.errors import *  # noqa: F403 - all of them: it says which

if TYPE_CHECKING:
    from hypercomm import cli as cli
    from hypercomm import compat as compat
    from hypercomm import launch as launch
    from hypercomm import layout as layout
    from hypercomm import testing as testing
    from hypercomm.compat.megatron.presets import create_megatron_pgs as create_megatron_pgs
    from hypercomm.compat.megatron.presets import megatron_grids as megatron_grids
    from hypercomm.compat.megatron.presets import megatron_requests as megatron_requests
    from hypercomm.compat.torchtitan import torchtitan_grids as torchtitan_grids
    from hypercomm.grid import HyperCommGrid as HyperCommGrid
    from hypercomm.grid.grid_set import GridSet as GridSet
    from hypercomm.joining import Joined as Joined
    from hypercomm.joining import Renewed as Renewed
    from hypercomm.joining import renew_world as renew_world
    from hypercomm.joining.join import join as join
    from hypercomm.launch import run_ranks as run_ranks
    from hypercomm.layout import RankGroups as RankGroups
    from hypercomm.layout import RankLayout as RankLayout
    from hypercomm.layout import RankMapping as RankMapping
    from hypercomm.process_groups.spec import GroupKey as GroupKey
    from hypercomm.tools.draw import draw as draw
    from hypercomm.tools.place import live_topology as live_topology
    from hypercomm.tools.place import place as place
    from hypercomm.tools.place import read_topology as read_topology
    from hypercomm.transfers.state import transfer_state as transfer_state
    from hypercomm.transfers.transfer import transfer as transfer

__version__ = "0.1.0"

_HOMES = {
    "GridSet": "hypercomm.grid.grid_set",
    "GroupKey": "hypercomm.process_groups.spec",
    "HyperCommGrid": "hypercomm.grid",
    "Joined": "hypercomm.joining",
    "RankGroups": "hypercomm.layout",
    "RankLayout": "hypercomm.layout",
    "RankMapping": "hypercomm.layout",
    "Renewed": "hypercomm.joining",
    "cli": "hypercomm.cli",
    "compat": "hypercomm.compat",
    "create_megatron_pgs": "hypercomm.compat.megatron.presets",
    "draw": "hypercomm.tools.draw",
    "join": "hypercomm.joining",
    "launch": "hypercomm.launch",
    "live_topology": "hypercomm.tools.place",
    "layout": "hypercomm.layout",
    "megatron_grids": "hypercomm.compat.megatron.presets",
    "megatron_requests": "hypercomm.compat.megatron.presets",
    "place": "hypercomm.tools.place",
    "read_topology": "hypercomm.tools.place",
    "renew_world": "hypercomm.joining",
    "run_ranks": "hypercomm.launch",
    "testing": "hypercomm.testing",
    "torchtitan_grids": "hypercomm.compat.torchtitan",
    "transfer": "hypercomm.transfers.transfer",
    "transfer_state": "hypercomm.transfers.state",
}

__all__ = [
    "GridSet",
    "GroupKey",
    "HyperCommGrid",
    "Joined",
    "RankGroups",
    "RankLayout",
    "RankMapping",
    "Renewed",
    "__version__",
    "create_megatron_pgs",
    "draw",
    "join",
    "live_topology",
    "megatron_grids",
    "megatron_requests",
    "place",
    "read_topology",
    "renew_world",
    "run_ranks",
    "torchtitan_grids",
    "transfer",
    "transfer_state",
]
__all__ += errors.__all__


def _resolver(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a module's `__getattr__`, which imports what is asked for from its home."""

    def resolve(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            home = importlib.import_module(homes[name])
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "torch":
                raise
            raise errors.MissingPackageError(
                f"{module}.{name} needs torch: pip install torch"
            ) from error
        value = home if home.__name__ == f"{module}.{name}" else getattr(home, name)
        setattr(sys.modules[module], name, value)
        return value

    return resolve


__getattr__ = _resolver(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
