"""What the real ranks of test_private_names.py do without private names of torch."""

import functools
import inspect

import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid
from hypercomm.compat.megatron import parallel_state
from hypercomm.process_groups import c10d
from hypercomm.process_groups.c10d.private_names import PRIVATE_NAMES, private
from hypercomm.process_groups.job import current
from ranks.common import registered, sum_over
from ranks.version_ranks import Heard

HOWS = ("missing", "other", "raising")
"""How a name is broken."""


class OfTheTestError(Exception):
    """What a broken name raises."""


class Other:
    """Something else under the name: it takes one argument, and has no attributes."""

    def __call__(self, novelty, /):
        pass


class Raising:
    """It is there, and whatever is done with it raises."""

    def __init__(self, honest):
        if callable(honest) and not inspect.isclass(honest):
            functools.update_wrapper(self, honest, updated=())
            del self.__wrapped__
            self.__signature__ = _signature_of(honest)

    def __call__(self, *_, **__):
        raise OfTheTestError

    def __getattr__(self, name):
        if name in {"__wrapped__", "__get__"}:
            raise AttributeError(name)
        raise OfTheTestError


def _signature_of(function):
    try:
        return inspect.signature(function)
    except ValueError:  # a function in C++ has none
        return inspect.Signature()


class Without:
    """torch as hypercomm sees it, without some names, or with others in their place."""

    def __init__(self, honest, broken, place=""):
        self._honest, self._broken, self._place = honest, broken, place
        self._made = {}

    def __getattr__(self, name):
        path = f"{self._place}{name}"
        how = self._broken.get(path)
        if how == "missing":
            raise AttributeError(path)
        honest = getattr(self._honest, name)
        if how is not None:
            return self._in_place_of(honest, path, how)
        if any(other.startswith(f"{path}.") for other in self._broken):
            return self._made.setdefault(path, Without(honest, self._broken, f"{path}."))
        return honest

    def _in_place_of(self, honest, path, how):
        if path not in self._made:
            self._made[path] = Other() if how == "other" else Raising(honest)
        return self._made[path]


def begin_anew(broken):
    """Forget what was checked, also what the job holds of that, and break names."""
    private.root = Without(torch, broken) if broken else torch
    private._reasons.clear()
    job = current()
    job.has_store = c10d.knows_store()
    job.choices.clear()


def in_backward_threads(path):
    """Whether a name has to do with what backward passes know; it takes a Megatron to use it."""
    return "_tls" in path


def in_dtensor(path):
    return "DTensor" in path


def use(path):
    """Create groups in every way, hand them on, and end them; what was received."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    is_all = path in {"all", "nothing"}
    with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        sums = [sum_over(grid.create_pg(dims)) for dims in ("tp", "dp")]
        batch = [{"dims": dims, "name": "twin"} for dims in ("tp", ("tp", "dp"))]
        sums += [sum_over(group) for group in grid.create_pgs(batch)]
        if is_all or in_dtensor(path):
            mesh = grid.device_mesh("dp", "tp")["tp"]
            local = torch.full((1,), 10 ** dist.get_rank())
            sharded = DTensor.from_local(local, mesh, [Shard(0)])
            assert int(sharded.redistribute(mesh, [Replicate()]).to_local().sum()) == sums[0]
    if is_all or in_backward_threads(path):
        state = parallel_state.ParallelState.create(tensor_model_parallel_size=2)
        with state, parallel_state.use(state):
            assert sum_over(parallel_state.get_tensor_model_parallel_group()) == sums[0]
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    sums.append(sum_over(grid.create_pg("dp")))
    grid.abort()
    return sums


def without_each(hows):
    """Break each name in some ways, all of them in each; what was received, logged and left."""
    heard, found, before = Heard(), {}, registered()
    due = [name.path for name in PRIVATE_NAMES if name.is_due()]
    cases = [("nothing", "nothing", {})]
    cases += [(path, how, {path: how}) for how in hows for path in due]
    cases += [("all", how, dict.fromkeys(due, how)) for how in HOWS]
    for path, how, broken in cases:
        heard.lines.clear()
        begin_anew(broken)
        sums = use(path)
        found[path, how] = sums, [*heard.lines], [*private._reasons], registered() == before
    begin_anew({})
    return found
