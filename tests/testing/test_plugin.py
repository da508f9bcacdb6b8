"""The pytest plugin, as pytest shows it: one run over tests of every kind, and what it prints."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap

import pytest

from hypercomm.testing.on_ranks import most_ranks

PLUGIN = "hypercomm.testing.pytest_plugin"

TESTS = """
    import os, sys, threading, time, unittest
    import pytest, torch, torch.distributed as dist
    from hypothesis import assume, given, settings, strategies as st
    from hypercomm import RankLayout
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
        @given_ranks(st.booleans(), ranks=2, max_examples=1)
        def test_of_unittest(self, drawn):
            self.assertEqual(dist.get_world_size(), 2)

        @pytest.mark.ranks(1)
        def test_case(self):
            pass

    def size():
        print("one of", dist.get_world_size())
        return dist.get_world_size()

    def test_function(run_ranks):
        more = 1
        assert run_ranks(size, 2) == [2, 2]
        assert run_ranks(lambda: dist.get_rank() + more, 2) == [1, 2]
        assert run_ranks(dist.get_rank, 1) == [0]

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
"""

BAD_MARKERS = ["()", "('2')", "(2.0)", "(True)", "(0)", "(2, 2)", "(2, tiemout=3)"]


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
    assert "400 ranks are more than 4; --ranks-max=400 starts them\n" in shown
    assert "5 ranks are more than 4; --ranks-max=5 starts them\n" in shown


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
    assert told.startswith('\nrank 1 failed: Traceback (most recent call last):\n  File "'), told
    assert "in test_wrong\n    assert rank + 1 == 1\nAssertionError: assert (1 + 1) == 1\n" in told
    assert "hypercomm" not in told


# A hang says where each rank is.
def test_hang(shown):
    told = about(shown, "test_hang[ranks=2]")
    assert told.startswith("\nrank 0 failed: it had not returned after 1.5 s\n")
    assert len(re.findall(r'test_all.py", line \d+ in test_hang\n', told)) == 2
    assert "on_ranks.py" not in told
    assert told.count("before\n") == 2


# hypothesis draws here and runs there, in a method, too; the example is the smallest.
def test_drawn(shown):
    told = about(shown, "TestOfClass.test_drawn[ranks=2]")
    assert "    number=7,\n" in told
    assert "deprecated" not in told
    assert "PASSED test_all.py::TestCase::test_of_unittest\n" in shown


# Of given_ranks no example starts that has more ranks than the option allows; a test without any
# other is skipped, also where it is expected to fail.
def test_left_out(shown):
    assert "PASSED test_all.py::test_some_left_out\n" in shown
    assert "shape=(3,)" in about(shown, "test_some_left_out_and_wrong")
    for size in (5, 6, 8, 9):
        reason = f"{size} ranks are more than 4; --ranks-max={size} starts them"
        assert re.search(rf"SKIPPED \[\d\] .*: {reason}; no example had fewer\n", shown)


# What cannot work is an error of the test, which names what is wrong.
def test_what_cannot_work(shown):
    told = about(shown, "test_lock[ranks=2]")
    assert told.startswith("\nargument 'lock' of test_lock cannot be pickled for its ranks: <unl")
    assert about(shown, "test_async[ranks=1]").startswith("\ntest_async[ranks=1] is async")
    assert about(shown, "TestCase.test_case").startswith("\ntest_case is marked ranks, and is a m")
    assert about(shown, "test_unmarked").startswith("\nthe fixture 'ranks' is the number of ranks")


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
    told = re.findall(r"^the marker ranks of test_it takes .*; got .*$", shown, re.MULTILINE)
    assert len(told) == len(BAD_MARKERS)
    for option in ("--ranks-max", "--ranks-timeout"):
        assert f"ERROR: {option} must be larger than 0, got -1" in run_pytest(
            tmp_path, f"{option}=-1"
        )


# Without an option, the machine bounds the ranks.
def test_more_than_the_machine_should_start(tmp_path):
    text = "import pytest\n\n@pytest.mark.ranks(4096)\ndef test_it():\n    pass\n"
    (tmp_path / "test_it.py").write_text(text)
    assert f"4096 ranks are more than {most_ranks()}; " in run_pytest(tmp_path, "-rs")


# A module that ranks cannot import runs on them, too: its functions travel by value.
def test_importlib_mode(tmp_path):
    text = "import pytest\n\ndef two():\n    return 2\n\n"
    text += "@pytest.mark.ranks(1)\ndef test_it():\n    assert two() == 3\n"
    (tmp_path / "test_it.py").write_text(text)
    shown = run_pytest(tmp_path, "--import-mode=importlib")
    assert "AssertionError: assert 2 == 3\n +  where 2 = two()" in shown


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
