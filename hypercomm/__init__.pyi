# The names that `__init__.py` imports on first access.

from hypercomm import (
    cli as cli,
    compat as compat,
    errors as errors,
    grid as grid,
    launch as launch,
    layout as layout,
    testing as testing,
    tools as tools,
    training as training,
    transfers as transfers,
)
from hypercomm.compat.megatron.presets import (
    create_megatron_pgs as create_megatron_pgs,
    megatron_grids as megatron_grids,
    megatron_requests as megatron_requests,
)
from hypercomm.compat.torchtitan import torchtitan_grids as torchtitan_grids
from hypercomm.grid import HyperCommGrid as HyperCommGrid
from hypercomm.grid.dims import GridDims as GridDims
from hypercomm.grid.grid_set import GridSet as GridSet
from hypercomm.grid.view import GridView as GridView
from hypercomm.launch import (
    Joined as Joined,
    JoinedWorld as JoinedWorld,
    Renewed as Renewed,
    join as join,
    join_world as join_world,
    renew_world as renew_world,
    run_ranks as run_ranks,
)
from hypercomm.layout import RankGroups as RankGroups, RankLayout as RankLayout
from hypercomm.process_groups.spec import GroupKey as GroupKey, GroupRequest as GroupRequest
from hypercomm.process_groups.world import World as World
from hypercomm.testing import fake_world as fake_world
from hypercomm.tools.draw import draw as draw
from hypercomm.tools.launch_files import LaunchConfig as LaunchConfig, read_config as read_config
from hypercomm.tools.place import (
    live_topology as live_topology,
    place as place,
    read_topology as read_topology,
)
from hypercomm.training import clip_grad_norm_ as clip_grad_norm_
from hypercomm.transfers.holdings import Fused as Fused
from hypercomm.transfers.mapping import RankMapping as RankMapping
from hypercomm.transfers.state import transfer_state as transfer_state
from hypercomm.transfers.transfer import transfer as transfer

__version__: str
__all__ = [
    "GridDims",
    "GridSet",
    "GridView",
    "GroupRequest",
    "HyperCommGrid",
    "RankGroups",
    "RankLayout",
    "RankMapping",
    "World",
    "__version__",
    "clip_grad_norm_",
    "create_megatron_pgs",
    "draw",
    "fake_world",
    "join",
    "join_world",
    "live_topology",
    "megatron_grids",
    "place",
    "read_config",
    "read_topology",
    "renew_world",
    "run_ranks",
    "transfer",
    "transfer_state",
]
