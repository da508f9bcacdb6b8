"""Runs tests on several workers, with a time limit, and alone if they measure speed."""

import fcntl
import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import launcher_free

import hypercomm

ROOT = Path(__file__).resolve().parents[1]

NEEDED = ("hypothesis", "click", "rich", "yaml", "einops", "sybil", "megatron.core")
"""Modules that the whole suite imports, apart from torch. Extras `cli` and `test` bring them."""

LIMIT_S, SLOW_LIMIT_S = 120, 300
"""A test fails after this many seconds, and the stacks of its worker are shown."""

FULL = "full and not slow and not clients and not gpu"
"""The marks that `-m full` selects. A test marked `full` may also have cases marked `slow`."""

EXAMPLES = {"few": 25, "deep": 100}
"""The number of examples of a hypothesis test, by profile. example_counts.py scales with it."""


def can_import(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing, too
        return False


def is_whole_suite(config):
    """Return whether no tests were named on the command line."""
    return config.args_source is not config.ArgsSource.ARGS


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Run the whole suite on several workers if xdist is installed.

    Most tests wait, so there are more workers than cores.
    """
    option = config.option
    if "PYTEST_XDIST_WORKER" in os.environ or not config.pluginmanager.hasplugin("xdist"):
        return
    is_asked = option.numprocesses is not None or option.dist != "no" or option.tx
    is_one = option.usepdb or option.collectonly or option.capture == "no"
    if is_whole_suite(config) and not is_asked and not is_one:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        share = 2 if option.markexpr == "full" else 1.5  # workers per core: many of them wait
        option.numprocesses = min(round(share * cores), 8)
        option.dist = "worksteal"


def use_checkout(imported=hypercomm.__file__):
    """Stop unless hypercomm is imported from the checkout. This includes programs of tests."""
    if not Path(imported).resolve().is_relative_to(ROOT):
        raise pytest.UsageError(
            f"hypercomm is imported from {imported}, and these are the tests of {ROOT}; run "
            f"pip install -e '.[cli,test]' there"
        )
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, paths)])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    use_checkout()
    if config.option.markexpr == "full":
        config.option.markexpr = FULL
    missing = [name for name in NEEDED if not can_import(name)] if is_whole_suite(config) else []
    if missing:
        raise pytest.UsageError(
            f"{', '.join(missing)} cannot be imported, and the tests need it: "
            f"pip install -e '.[cli,test]'"
        )
    if can_import("hypothesis"):
        from hypothesis import HealthCheck, settings

        for name, examples in EXAMPLES.items():
            settings.register_profile(
                name,
                max_examples=examples,
                deadline=None,  # a test must not fail because the machine is busy
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            )
        settings.load_profile("few")  # --hypothesis-profile=deep loads "deep" later


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)  # these run last
    if not config.pluginmanager.hasplugin("timeout"):
        return
    for item in items:
        if item.get_closest_marker("timeout") is None:
            is_slow = any(item.get_closest_marker(name) for name in ("slow", "clients"))
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S if is_slow else LIMIT_S))


@pytest.fixture(autouse=True)
def alone_or_shared(request, tmp_path_factory):
    """Run a test that is marked `alone` while no other test runs. All other tests run together."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    folder = tmp_path_factory.getbasetemp().parent  # shared by all workers
    is_alone = request.node.get_closest_marker("alone") is not None
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)  # while an `alone` test waits, no other test starts
        fcntl.flock(room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


@pytest.fixture(scope="session", autouse=True)
def fork_server():
    """Start a worker's fork server with the modules that the ranks of several tests load."""
    if "PYTEST_XDIST_WORKER" in os.environ and can_import("torch"):
        from killable_ranks import CONTEXT

        CONTEXT.set_forkserver_preload(
            # DTensor imports torch._dynamo on first use, which takes half a second
            ["hypercomm.grid", "cloudpickle", "torch.distributed.tensor.parallel", "torch._dynamo"]
        )
        process = CONTEXT.Process(target=int)
        process.start()
        process.join()


class Completed(NamedTuple):
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def in_process(capfd, monkeypatch) -> Callable[..., Completed]:
    """Return a function that runs a command line in this process."""
    from hypercomm.cli import main

    for name in set(os.environ) - set(launcher_free()):
        monkeypatch.delenv(name)

    def call(*arguments: str) -> Completed:
        code = main(arguments)
        out, err = capfd.readouterr()
        return Completed(code, out, err)

    return call


@pytest.fixture
def ctrl_c():
    """Make programs of a test receive Ctrl-C, even if the shell that started pytest ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
