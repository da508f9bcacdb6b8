"""How the tests run: on several workers, none for ever, and alone where speed is asserted."""

import fcntl
import importlib.util
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from launched import rank_free

import hypercomm

ROOT = Path(__file__).resolve().parents[1]

NEEDED = ("hypothesis", "numpy", "attrs", "click", "rich", "yaml", "einops", "megatron.core")
"""What the whole suite imports beside torch; the extras `cli` and `test` bring it."""

LIMIT_S, SLOW_LIMIT_S = 120, 1800
"""After how long a test has failed, and its worker's stacks are shown."""

FULL = "full and not slow and not clients and not gpu"
"""What `-m full` runs: a case of a test that is marked `full` may be slow."""

EXAMPLES = {"few": 25, "deep": 100}
"""Examples of a hypothesis test, by profile, where 100 is the default: see effort.py."""


def is_there(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor its package
        return False


def is_whole_suite(config):
    """Whether nobody has named tests: then there are enough of them for several workers."""
    return config.args_source is not config.ArgsSource.ARGS


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Let xdist, where it is, share out the whole suite; most tests wait, so on more than cores."""
    option = config.option
    if "PYTEST_XDIST_WORKER" in os.environ or not config.pluginmanager.hasplugin("xdist"):
        return
    is_asked = option.numprocesses is not None or option.dist != "no" or option.tx
    is_one = option.usepdb or option.collectonly or option.capture == "no"
    if is_whole_suite(config) and not is_asked and not is_one:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        share = 2 if option.markexpr == "full" else 1.5  # workers of a core: many of these wait
        option.numprocesses, option.dist = min(round(share * cores), 8), "worksteal"


def use_checkout(imported=hypercomm.__file__):
    """Stop unless the tests run on the checkout; the programs that they start do so, too."""
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
    missing = [name for name in NEEDED if not is_there(name)] if is_whole_suite(config) else []
    if missing:
        raise pytest.UsageError(
            f"{', '.join(missing)} cannot be imported, and the tests need it: "
            f"pip install -e '.[cli,test]'"
        )
    if is_there("hypothesis"):
        from hypothesis import HealthCheck, settings

        for name, examples in EXAMPLES.items():
            settings.register_profile(
                name,
                max_examples=examples,
                deadline=None,  # a busy machine is no failure
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            )
        settings.load_profile("few")  # --hypothesis-profile=deep loads the other one, afterwards


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)  # who waits, last
    if not config.pluginmanager.hasplugin("timeout"):
        return
    for item in items:
        if item.get_closest_marker("timeout") is None:
            is_slow = any(item.get_closest_marker(name) for name in ("slow", "clients"))
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S if is_slow else LIMIT_S))


@pytest.fixture(autouse=True)
def turn(request, tmp_path_factory):
    """Give a test that is marked `alone` the machine for itself; all others run side by side."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    folder = tmp_path_factory.getbasetemp().parent  # which all workers have in common
    is_alone = request.node.get_closest_marker("alone") is not None
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)  # who waits to be alone lets nobody in
        fcntl.flock(room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


@pytest.fixture(scope="session", autouse=True)
def fork_server():
    """Start a worker's fork server with all that ranks of several tests would load, each anew."""
    if "PYTEST_XDIST_WORKER" in os.environ and is_there("torch"):
        from mortal_ranks import CONTEXT

        CONTEXT.set_forkserver_preload(
            # DTensor imports the last one at its first use: half a second in each rank
            ["hypercomm.grid", "cloudpickle", "torch.distributed.tensor.parallel", "torch._dynamo"]
        )
        process = CONTEXT.Process(target=int)
        process.start()
        process.join()


@pytest.fixture
def in_process(capsys, monkeypatch):
    """Call the command line in this process; return its exit code and output."""
    from hypercomm.cli import main

    for name in set(os.environ) - set(rank_free()):
        monkeypatch.delenv(name)

    def call(*arguments):
        code = main(arguments)
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return call


@pytest.fixture
def ctrl_c():
    """Let Ctrl-C be heard by what a test starts, also where the shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_generate_tests(metafunc):
    """Run tests of a promise in seconds at its full scale in the slow lane, else at a third."""
    if "timeout_s" in metafunc.fixturenames:
        metafunc.parametrize("timeout_s", [1.0, pytest.param(3.0, marks=pytest.mark.slow)])
