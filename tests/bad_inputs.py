"""Bad inputs: wrong values, calls drawn from signatures, and what must not change.

A call is drawn around one that works: most arguments are right, one or two are not.
"""

import contextlib
import inspect
import math
import os
import random
import signal
import warnings
from datetime import timedelta
from functools import partial

import numpy as np
import torch.distributed as dist

from hypercomm import GridSet, HyperCommGrid, RankLayout
from hypercomm.compat.ezpz import tp as ezpz
from hypercomm.compat.ezpz.state import current as ezpz_current
from hypercomm.compat.megatron import parallel_state as mpu
from hypercomm.compat.megatron.state.state import current as mpu_current
from hypercomm.layout import RankGroups
from hypercomm.testing import fake_world

LAYOUT = RankLayout([2, 2, 2], ["tp", "cp", "dp"])
PATIENCE_S = 20.0  # a first import of pandas takes some on a busy machine


class OwnError(ValueError):
    """What an object of the caller's raises: it passes through, and is no error of the library."""


class HangError(BaseException):
    """A call took longer than any bad call may."""


# ---- values -------------------------------------------------------------------------------------


class RaisingIter:
    def __iter__(self):
        raise OwnError("no iteration")


class RaisingIndex:
    def __index__(self):
        raise OwnError("no index")

    def __int__(self):
        raise OwnError("no int")


class RaisingMidway:
    def __iter__(self):
        yield "tp"
        raise OwnError("midway")


class Lying(list):
    """A list that says that it is empty."""

    def __len__(self):
        return 0


def raising(*_):
    raise OwnError("called")


# Each a function, so that what can be used up or changed is new for every call.
_SCALARS = [
    None,
    True,
    False,
    *(0, 1, 2, 3, 5, 7, 8, 9, 64, -1, -2, -8, 2**31, 2**63, 2**70, -(2**70)),
    *(0.0, 1.0, 2.5, -1.0, 1e300, math.nan, math.inf, -math.inf),
    *(2j, NotImplemented, ..., object, int, RankLayout, HyperCommGrid, timedelta, RaisingIter),
    *("", " ", "=", "-", ",", "+", "tp", "xx", "tp ", "tp,", "tp=2", "tp=2,tp=2", "tp=0", "tp=-1"),
    *(
        "tp=2,dp",
        "tp,dp",
        "tp=x",
        "tp-cp-dp",
        "tp--cp",
        "tp-tp",
        "tp+cp",
        "tp+tp",
        "\x00",
        "\ud800",
    ),
    *("é", "ﬁ", "tp\n", "2", "-1", "nan", "gloo", "nccl", "fake", "mpi", "bogus", "cpu:gloo"),
    *("cpu:gloo,cuda:nccl", "cpu:", ":", "cpu:gloo,cpu:gloo", "cuda:", "undefined", "GLOO"),
    *(
        "/",
        "no/such/file",
        "any",
        "exact",
        "local",
        "split",
        "enumerate",
        "never",
        "identical",
        "{}",
        "[]",
        "null",
    ),
    '{"shape": [2], "dim_names": ["tp"], "strides": null}',
    '{"shape": 2, "dim_names": "tp"}',
    '{"shape": [1e400], "dim_names": ["tp"]}',
    *(b"", b"tp", b"tp=2", bytearray(b"tp"), memoryview(b"tp")),
    *(np.int64(5), np.int64(-1), np.int8(2), np.uint64(2**63), np.float64(2), np.bool_(True)),
    *(np.str_("tp"), np.datetime64("NaT", "s"), timedelta(0), timedelta(seconds=-1), timedelta.max),
    *(timedelta.min, timedelta(microseconds=1), timedelta(hours=1)),
    *(range(0), range(3), range(2**70), slice(None), len, print, raising),
    *(LAYOUT, LAYOUT.groups("dp"), fake_world),
]
_MADE = [
    object,
    RaisingIter,
    RaisingIndex,
    RaisingMidway,
    Lying,
    partial(Lying, ["tp"]),
    dict,
    list,
    set,
    tuple,
    frozenset,
    partial(np.zeros, 0),
    partial(np.zeros, 2),
    partial(np.array, 5),
    partial(np.array, [5, 6]),
    partial(np.array, ["tp", "cp"]),
    partial(np.array, [[1, 2], [3, 4]]),
    partial(np.array, [2, 2, 2]),
    partial(np.array, [None, "tp"], dtype=object),
    lambda: iter(()),
    lambda: iter(["tp"]),
    lambda: (name for name in ("tp", "xx")),
    lambda: (size for size in (2, 2, 2)),
    lambda: map(raising, [1]),
    lambda: {"tp": 2, "cp": 2, "dp": 2},
    lambda: {"dims": "tp"},
    lambda: {"tp", "cp"},
    lambda: {1: 2},
    lambda: lambda ranks: ranks,
    lambda: lambda _: [],
    lambda: lambda _: [99],
    lambda: lambda _: 7,
    lambda: lambda _: None,
    lambda: lambda _: ["tp"],
    lambda: lambda ranks: ranks[: 1 + ranks[0] % 2],
    lambda: lambda _: [[0]],
]
_NEAR = [
    *(["xx"], ["tp", "xx"], ["tp", "tp"], ["tp", 3], ["tp", None], ["tp", ["cp"]], [["tp"], "cp"]),
    *(["tp", "cp"], ("dp", "tp"), ["cp", "dp", "tp"], ["tp", ""], ["tp", "c p"], ["tp", "a=b"]),
    *([2], [2, 2], [2, 2, 2], [2, 2, 2, 2], [3, 2, 2], [0, 2, 2], [-1, 2, 2], [-1, -1, 2]),
    *(
        [2.0, 2, 2],
        [True, 2, 2],
        ["2", 2, 2],
        [None, 2, 2],
        [2**70, 2, 2],
        [2, 2**31, 2],
        [1, 1, 1],
    ),
    *(
        [1, 2, 3],
        [4, 2, 1],
        [1, 1, 2],
        [0, 0, 0],
        [[2], [2], [2]],
        [2, math.nan, 2],
        [np.int64(2)] * 3,
    ),
    *([8], [0], [-1], [5, 5], [0, 99], [2**70], [1.5], ["a"], [()], [None], [[]], [{}], [set()]),
    *([["tp"], ["tp"]], [("tp", "cp"), ("cp", "tp")], ["tp", {"dims": "tp"}], [{}], [{"dims": 7}]),
    *([{"dims": "tp", "junk": 1}], [{"dims": "tp", "backend": 7}], [{"dims": "xx"}]),
    *([{"dims": "tp", "name": ""}], [{"dims": "tp", "timeout": 3}], [{"dims": []}], [{1: 2}]),
    *([{"dims": "tp", "derive": 7}], [{"dims": "tp", "share": None, "name": 3}]),
    *(
        {"tp": -1},
        {"dp": {"max_ctas": 0}},
        {"dp": {"bogus": 1}},
        {"dp": 7},
        {"dp": {"max_ctas": 2}},
    ),
    *(("max_ctas", 8), ("max_ctas",), ("bogus", 1)),
]

_LEAVES = [None, 0, 1, -1, 2**70, 2.5, "", "tp", "xx", b"tp"]
_KEYS = ["tp", "xx", 0, None]
_LETTERS = "tpcd=-+, 0123\né"
_ODD_LETTERS = "tpx0 \t\x00\x7f\x85é\u07c0\u2177\u200b\ufeff\ud800\U0001f600\U0010ffff"
_KEYWORDS = ["tp", "cp", "dp", "pp", "xx", "", "a b", "tp=2", "é", "a", "b", "self"]
_FAMILIES = ["scalar", "near", "made", "int", "text", "nested"]


class Draws(random.Random):
    """Draws that are the same wherever the tests run: they depend on a name, and on nothing else.

    Hypothesis has other ones where the library is installed than in a checkout, and after other
    modules were loaded, as it takes numbers and words out of the sources it finds.
    """

    def __init__(self, name):
        super().__init__(name)
        self._left = {}

    def new(self, key, values):
        """Draw a value that has not come for this key, until all have."""
        left = self._left.setdefault(key, [])
        if not left:
            left += self.sample(values, len(values))
        return left.pop()

    def some(self, draw):
        """Draw at most three."""
        return [draw() for _ in range(self.randint(0, 3))]

    def text(self, letters, longest):
        return "".join(self.choices(letters, k=self.randint(0, longest)))

    def nested(self, depth=2):
        """Draw a list, a pair or a dict of such, or a plain value."""
        kind = self.choice(["leaf", "text", "int", "list", "pair", "dict"][: 6 if depth else 3])
        if kind == "leaf":
            return self.choice(_LEAVES)
        if kind == "text":
            return self.text(_ODD_LETTERS, 3)
        if kind == "int":
            return self.randint(-100, 100)
        if kind == "list":
            return self.some(lambda: self.nested(depth - 1))
        if kind == "pair":
            return self.nested(depth - 1), self.nested(depth - 1)
        keys = self.sample(_KEYS, self.randint(0, 2))
        return {key: self.nested(depth - 1) for key in keys}

    def junk(self, key=None):
        """Draw a value that hardly any argument can have, though one may."""
        family = self.choice(_FAMILIES)
        if family == "scalar":
            return _copied(self.new((family, key), _SCALARS))
        if family == "near":
            return _copied(self.new((family, key), _NEAR))
        if family == "made":
            return self.new((family, key), _MADE)()
        if family == "int":
            return self.randint(-100, 100)
        return self.text(_LETTERS, 12) if family == "text" else self.nested()


def has_truth(value):
    """Tell whether a value can be a flag; an array says itself that it cannot."""
    return not (isinstance(value, np.ndarray) and value.size != 1)


def is_own_function(value):
    """Tell whether a value is no function, or one of this file: others raise what they like."""
    return not callable(value) or (inspect.isfunction(value) and value.__module__ == __name__)


def _copied(value):
    return value.copy() if type(value) in {list, dict, set} else value


# ---- calls --------------------------------------------------------------------------------------


class Call:
    """Arguments, written as in a call."""

    def __init__(self, name, args, kwargs):
        self.name = name
        self.args = args
        self.kwargs = kwargs

    def __repr__(self):
        words = [repr(arg) for arg in self.args]
        words += [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"{self.name}({', '.join(words)})"


FUNCTIONS = ("function", "derive", "get_embedding_ranks", "on_message")
FUNCTIONS += ("get_position_embedding_ranks",)
"""Parameters that take a function, which is called."""


def can_be_refused(parameter, value):
    """Tell whether a value is one that a parameter can be asked to refuse."""
    if parameter.name in FUNCTIONS:
        return is_own_function(value)
    return has_truth(value) if "bool" in str(parameter.annotation) else True


def draw_junk(draws, parameter):
    while True:
        value = draws.junk(parameter.name)
        if can_be_refused(parameter, value):
            return value


def draw_call(draws, name, signature, good):
    """Draw arguments that fit a signature, one or two of them bad.

    `good` is asked for an argument that works by the name of the parameter, and returns None where
    it knows none.
    """
    args, kwargs = [], {}
    parameters = list(signature.parameters.values())
    if not parameters:
        return Call(name, args, kwargs)
    names = [parameter.name for parameter in parameters]
    bad = {draws.new("bad", names), draws.choice(names)}
    drop = draws.random() < 0.5
    has_variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    for parameter in parameters:
        make = good(parameter.name)
        if parameter.kind is parameter.VAR_POSITIONAL:
            is_drawn = parameter.name in bad or make is None
            args += draws.some(lambda: draw_element(draws)) if is_drawn else make()
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            kwargs |= make() if make is not None else {}
            if parameter.name in bad or make is None:
                free = [keyword for keyword in _KEYWORDS if keyword not in names]
                drawn = draws.some(lambda: (draws.choice(free), draw_field(draws)))  # noqa: B023
                kwargs |= dict(drawn)
            continue
        required = parameter.default is parameter.empty
        if parameter.name not in bad and not required and (drop or make is None):
            if parameter.kind is parameter.POSITIONAL_ONLY or has_variadic:
                args += [parameter.default] if parameter.kind is not parameter.KEYWORD_ONLY else []
            continue
        is_drawn = parameter.name in bad or make is None
        value = draw_junk(draws, parameter) if is_drawn else make()
        early = has_variadic and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if early or parameter.kind is parameter.POSITIONAL_ONLY:
            args.append(value)
        else:
            kwargs[parameter.name] = value
    return Call(name, args, kwargs)


def draw_element(draws):
    """Draw one of `*arguments`."""
    return draws.choice(["tp", "cp", "dp"]) if draws.random() < 0.3 else draws.junk("*")


def draw_field(draws):
    """Draw one of `**arguments`."""
    return draws.choice([0, 1, 2, -1, "x"]) if draws.random() < 0.3 else draws.junk("**")


@contextlib.contextmanager
def patience(seconds=PATIENCE_S):
    """Raise `HangError` in a block that does not end."""

    def give_up(*_):
        raise HangError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def look(result):
    """Use what a call returned, because some of it computes only then."""
    if isinstance(result, RankGroups):
        list(result)
        repr(result)
    elif isinstance(result, tuple) and result and isinstance(result[0], RankGroups):
        for groups in result:
            look(groups)
    elif isinstance(result, contextlib.AbstractContextManager) and not isinstance(
        result, HyperCommGrid | GridSet
    ):
        with result:
            pass
    elif isinstance(result, HyperCommGrid | GridSet):
        result.destroy()


# ---- stages: what exists while a call is made ---------------------------------------------------


class Stage:
    """A fake world with what a call needs in it; kept from call to call while nothing changes."""

    def __init__(self):
        self._kind = None
        self._stack = contextlib.ExitStack()
        self.grid = self.grids = None

    def enter(self, kind):
        """Have what `kind` names: nothing, a world, a grid in one, or a legacy state in one."""
        if kind == self._kind:
            return
        self.leave()
        self._kind = kind
        if kind == "nothing":
            return
        self._stack.enter_context(fake_world(8, rank=7 if kind == "outside" else 5))
        if kind in {"grid", "destroyed", "outside"}:
            shape = [3, 2] if kind == "outside" else [2, 2, 2]
            self.grid = HyperCommGrid(shape, ["tp", "cp", "dp"][: len(shape)])
            self._stack.callback(self.grid.destroy)
            self.grid.create_pg("cp")
            if kind != "outside":
                self.grid.register_view("expert", [4, 2], ["ep", "expt_dp"])
            if kind == "grid":
                self.grid.create_pg("dp")
                self.grid.create_pg("dp", name="twin")
                self.grid.plan_pg(["tp", "cp"])
            if kind == "destroyed":
                self.grid.destroy()
        if kind == "set":
            self.grids = GridSet.colocated(a="tp=2,dp", b="tp=4,dp")
            self.grid = self.grids["a"]
            self._stack.callback(self.grids.destroy)
            self.grid.create_pg("dp")
        if kind == "mpu":
            mpu.initialize_model_parallel(2, 2, context_parallel_size=2)
        if kind == "ezpz":
            ezpz.initialize_tensor_parallel(2, 2)
        self._stack.callback(mpu.destroy_model_parallel)
        self._stack.callback(ezpz.destroy_tensor_parallel)

    def leave(self):
        """Have nothing."""
        self._kind = self.grid = self.grids = None
        self._stack.close()

    def seen(self):
        """All that a call which fails must leave as it was."""
        torch_world = dist.distributed_c10d._world
        registered = [
            dict(getattr(torch_world, name))
            for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")
        ]
        tags = {tag: list(groups) for tag, groups in torch_world.tags_to_pg.items()}
        states = [
            (dict(current.default.values), current.default.names(), current.alone)
            for current in (mpu_current, ezpz_current)
        ]
        grids = dict(mpu_current.default.grids), ezpz_current.default.grid
        found = {
            "torch's groups": registered,
            "torch's tags": tags,
            "torch's count of groups": torch_world.group_count,
            "legacy globals": states,
            "legacy grids": grids,
            "environment": dict(os.environ),
            "warning filters": list(warnings.filters),
        }
        if self.grid is not None:
            found["pgs"] = dict(self.grid.pgs)
            found["plans"] = list(self.grid._state.owner.planned)
            found["repr"] = str(self.grid)
            found["views"] = dict(self.grid.views)
        if self.grids is not None:
            found["set"] = [(str(grid), dict(grid.pgs)) for grid in self.grids.values()]
        return found
