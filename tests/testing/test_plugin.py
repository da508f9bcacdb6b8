"""The pytest plugin, as pytest shows it: one run over tests of every kind, and what it prints."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap

import pytest

from hypercomm.testing.kit.running import most_ranks

PLUGIN = "hypercomm.testing.kit.plugin"

TESTS = """
    import os, sys, threading, time, unittest
    import pytest, torch, torch.distributed as dist
    from hypothesis import assume, given, settings, strategies as st
    from hypercomm import HyperCommGrid, RankLayout, run_ranks as start
    from hypercomm.testing import given_ranks

    @pytest.fixture
    def lock():
        return threading.Lock()

    @pytest.mark.ranks(1, 2, 400)
    def test_sum(ranks, tmp_path):
        total = torch.ones(1)
        dist.all_reduce(total)
        os.system(f"echo below Python on {dist.get_rank()}")
        (tmp_path / str(dist.get_rank())).touch()  # a folder that all ranks have
        assert total.item() == ranks == dist.get_world_size()

    @pytest.mark.ranks(2)
    def test_wrong():
        rank = dist.get_rank()
        print("I am", rank, file=sys.stderr)
        assert rank + 1 == 1

    @pytest.mark.ranks(2)
    def test_lock(lock):
        pass

    @pytest.mark.ranks(2, timeout=1.5)
    def test_hang():
        print("before")
        if dist.get_rank() == 0:
            dist.barrier()
        time.sleep(100)

    @pytest.mark.ranks(1)
    def test_skip():
        pytest.skip("not today")

    @pytest.mark.ranks(1)
    def test_xfail():
        pytest.xfail("known")

    @pytest.mark.ranks(1)
    async def test_async():
        pass

    class TestOfClass:
        word = "mine"

        @pytest.mark.ranks(2)
        @settings(deadline=None, max_examples=8, database=None)
        @given(number=st.integers(0, 9))
        def test_drawn(self, ranks, number):
            assume(number != 6)
            total = torch.tensor([number])
            dist.all_reduce(total)
            assert self.word == "mine"
            assert total.item() <= 5 * ranks

    sizes = st.sampled_from([2, 3, 5, 400])

    @given_ranks(sizes.map(lambda size: RankLayout([size], ["tp"])), ranks_max=64)
    def test_some_left_out(layout):
        assert dist.get_world_size() == layout.size <= 4

    @given_ranks(sizes.map(lambda size: RankLayout([size], ["tp"])))
    def test_some_left_out_and_wrong(layout):
        assert layout.size != 3

    @given_ranks(st.sampled_from([RankLayout([5], ["tp"]), RankLayout([6], ["tp"])]))
    def test_all_left_out(layout):
        raise AssertionError(layout)

    @pytest.mark.xfail(strict=True)
    @given_ranks(st.just(RankLayout([8], ["tp"])))
    def test_left_out_and_strict(layout):
        raise AssertionError(layout)

    @pytest.mark.xfail
    @given_ranks(st.just(RankLayout([9], ["tp"])))
    def test_left_out_and_lenient(layout):
        raise AssertionError(layout)

    @given_ranks(st.booleans(), ranks=6)
    def test_left_out_by_ranks(drawn):
        raise AssertionError(drawn)

    class TestCase(unittest.TestCase):
        @given_ranks(st.booleans(), ranks=7)
        def test_left_out_too(self, drawn):
            raise AssertionError(drawn)

        @pytest.mark.ranks(1)
        def test_case(self):
            pass

    def size():
        print("one of", dist.get_world_size())
        return dist.get_world_size()

    def test_function(run_ranks):
        assert run_ranks(size, 2) == [2, 2]

    def test_many(run_ranks):
        run_ranks(size, 5)

    def test_unmarked(ranks):
        pass

    def test_fake(fake_world):
        fake_world(64, rank=3)
        with fake_world(32, rank=5):
            assert (dist.get_rank(), dist.get_world_size()) == (5, 32)
        assert not dist.is_initialized()
        fake_world(16)

    def sleep():
        time.sleep(1000)

    started = threading.Event()

    @pytest.mark.filterwarnings("ignore")
    def test_left():
        threading.Thread(target=start, args=(sleep, 2), daemon=True).start()
        import multiprocessing
        while len(multiprocessing.active_children()) < 2:
            time.sleep(0.01)
"""

BAD_MARKERS = {
    "()": "it names no size; give one at least, as in @pytest.mark.ranks(2, 4)",
    "('2')": "a size must be an int, got '2', as in @pytest.mark.ranks(2, 4)",
    "(2.0)": "a size must be an int, got 2.0, as in @pytest.mark.ranks(2, 4)",
    "(True)": "a size must be an int, got True, as in @pytest.mark.ranks(2, 4)",
    "(0)": "sizes must be in 1..4096, got (0,)",
    "(2, 5000)": "sizes must be in 1..4096, got (2, 5000)",
    "(2, 2)": "it names a size twice: (2, 2)",
    "(2, tiemout=3)": "it has no tiemout=; it takes sizes, timeout and backend",
    "(2, timeout=0)": "timeout must be a number of seconds larger than 0, got 0",
}


def run_pytest(folder, *arguments):
    """Run pytest on a folder as on a project of its own."""
    plain = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**plain, "COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What pytest shows of those tests."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_all.py").write_text(textwrap.dedent(TESTS))
    return run_pytest(folder, "-rA", "--ranks-max=4")


def about(shown, test):
    """Cut out what is shown of a test."""
    title = rf"^_+ (?:ERROR at \w+ of )?{re.escape(test)} _+$"
    behind = re.split(title, shown, flags=re.MULTILINE)[1]
    return re.split(r"^(?:_+ .* _+|=+ .* =+)$", behind, flags=re.MULTILINE)[0]


pytestmark = pytest.mark.long


# Each size is a test of its own, on as many ranks, and what is too large says why it is skipped.
def test_sizes(shown):
    for size in (1, 2):
        assert f"PASSED test_all.py::test_sum[ranks={size}]\n" in shown
    assert "400 ranks are more than --ranks-max=4\n" in shown
    assert "5 ranks are more than --ranks-max=4\n" in shown
    assert "PASSED test_all.py::TestOfClass" not in shown


# What a rank prints is in the report, by rank, also from below Python and of tests that pass.
def test_output_of_each_rank(shown):
    told = about(shown, "test_sum[ranks=2]")
    for rank in (0, 1):
        assert re.search(
            rf"-+ Captured output of rank {rank} call -+\nbelow Python on {rank}\n", told
        )
    assert "Captured output of rank 1 call" not in about(shown, "test_sum[ranks=1]")
    assert "I am 1\n" in about(shown, "test_wrong[ranks=2]")
    assert about(shown, "test_function").count("one of 2\n") == 2


# A failure is the first failing rank's traceback, with values, and without our frames.
def test_traceback(shown):
    told = about(shown, "test_wrong[ranks=2]")
    assert told.startswith('\nrank 1 of 2 failed: Traceback (most recent call last):\n  File "'), (
        told
    )
    assert "in test_wrong\n    assert rank + 1 == 1\nAssertionError: assert (1 + 1) == 1\n" in told
    assert "hypercomm" not in told


# A hang says where each rank is.
def test_hang(shown):
    told = about(shown, "test_hang[ranks=2]")
    assert told.startswith(
        "\nrank 0 of 2 failed: it had not returned after 1.5 s\nranks [0] are at\n"
    )
    assert len(re.findall(r'test_all.py", line \d+ in test_hang\n', told)) == 2
    assert "bodies.py" not in told
    assert told.count("before\n") == 2


# hypothesis draws here and runs there, in a method, too; the example is the smallest.
def test_drawn(shown):
    told = about(shown, "TestOfClass.test_drawn[ranks=2]")
    assert "    number=7,\n" in told
    assert "Explanation" not in told
    assert "deprecated" not in told


# Of given_ranks no example starts that has more ranks than the option allows; the report says how
# many those were, and a test without any other is skipped.
def test_left_out(shown):
    told = "2 of 4 examples were not started: they have more than --ranks-max=4 ranks\n"
    assert told in about(shown, "test_some_left_out")
    assert "PASSED test_all.py::test_some_left_out\n" in shown
    wrong = about(shown, "test_some_left_out_and_wrong")
    assert " of 3 failed: " in wrong
    assert " not started: they have more than --ranks-max=4 ranks\n" in wrong
    for size in (5, 6, 7, 8, 9):
        told = f"{size} ranks are more than --ranks-max=4, and no example had fewer\n"
        assert f"SKIPPED [1] test_all.py: {told}" in shown


# What cannot work says so in one sentence.
def test_sentences(shown):
    assert about(shown, "test_lock[ranks=2]").startswith(
        "\nfixture 'lock' of test_lock must travel to its ranks by pickle, and cannot: <unlocked "
        "_thread.lock object at "
    )
    assert "cannot pickle '_thread.lock' object; make it in the test's body, of what can\n" in shown
    assert about(shown, "test_async[ranks=1]").startswith(
        "\ntest_async[ranks=1] is async, and ranks have no event loop: call asyncio.run() in a "
        "body that is not\n"
    )
    assert about(shown, "TestCase.test_case").startswith(
        "\ntest_case is marked ranks, and is no function of pytest's, which alone can be run once "
        "for each size: make a method of unittest.TestCase one of another class\n"
    )
    assert about(shown, "test_unmarked").startswith(
        "\nthe fixture 'ranks' is the number of ranks of a test that is marked, as in "
        "@pytest.mark.ranks(2, 4), and this one is not: mark it, or take the fixture 'run_ranks' "
        "to start ranks in the test\n"
    )


# Ranks that a test leaves behind are named, and ended.
def test_ranks_left_behind(shown):
    told = about(shown, "test_left")
    assert re.match(
        r"\ntest_left left ranks behind, which were ended: rank 0 \(pid \d+\), rank 1 \(pid \d+\); "
        r"wait for whatever runs them, such as the thread that called run_ranks\(\)\n",
        told,
    )
    for pid in re.findall(r"pid (\d+)", told):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


# A body may skip, and expect to fail; worlds are left when a test ends.
def test_outcomes(shown):
    assert "not today\n" in shown
    assert "XFAIL test_all.py::test_xfail[ranks=1] - known\n" in shown
    assert "PASSED test_all.py::test_fake\n" in shown


# Markers that cannot work, and options: nothing runs.
def test_bad_markers(tmp_path):
    for number, marker in enumerate(BAD_MARKERS):
        text = f"import pytest\n\n@pytest.mark.ranks{marker}\ndef test_it():\n    pass\n"
        (tmp_path / f"test_{number}.py").write_text(text)
    shown = run_pytest(tmp_path, "--continue-on-collection-errors")
    for sentence in BAD_MARKERS.values():
        assert f"\nthe marker ranks of test_it cannot work: {sentence}\n" in shown
    for options, sentence in {
        "--ranks-max=0": "--ranks-max must be in 1..4096, got 0",
        "--ranks-max=5000": "--ranks-max must be in 1..4096, got 5000",
        "--ranks-timeout=0": "--ranks-timeout must be larger than 0, got 0",
    }.items():
        assert f"ERROR: {sentence}\n" in run_pytest(tmp_path, options)


# Without an option, the machine bounds the ranks.
def test_more_than_the_machine_should_start(tmp_path):
    text = "import pytest\n\n@pytest.mark.ranks(4096)\ndef test_it():\n    pass\n"
    (tmp_path / "test_it.py").write_text(text)
    assert re.search(
        rf"4096 ranks are more than the {most_ranks()} that this machine with \d+ processors? "
        rf"should start; --ranks-max=4096 starts them\n",
        run_pytest(tmp_path, "-rs"),
    )


# Reports come through xdist as they are.
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")
def test_xdist(tmp_path):
    (tmp_path / "test_all.py").write_text(textwrap.dedent(TESTS))
    shown = run_pytest(tmp_path, "-n1", "-rA", "-k", "sum or wrong", "--ranks-max=4")
    assert "PASSED test_all.py::test_sum[ranks=2]\n" in shown
    told = about(shown, "test_wrong[ranks=2]")
    assert "AssertionError: assert (1 + 1) == 1\n" in told
    assert "Captured output of rank 1 call" in told
    assert "400 ranks are more than --ranks-max=4\n" in shown
