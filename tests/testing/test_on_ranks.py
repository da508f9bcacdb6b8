"""Test `given_ranks`, and the output of pytest with hypercomm's plugin."""

import os
import re
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, strategies as st
from processes import run_python

from hypercomm import GridSet, HyperCommGrid, RankLayout, RankMapping
from hypercomm.errors import LaunchError, RankFailedError
from hypercomm.launch.run import most_ranks
from hypercomm.testing import given_ranks, grids, layouts, on_ranks, pytest_plugin

TESTS = """
    import functools, os, sys, threading, time, unittest
    import pytest, torch, torch.distributed as dist
    from hypothesis import assume, given, strategies as st
    from time_limits import startup_timeout_s
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
        (tmp_path / str(dist.get_rank())).touch()  # one folder for all ranks
        assert total.item() == ranks == dist.get_world_size()

    @pytest.mark.ranks(2)
    def test_wrong():
        rank = dist.get_rank()
        print("I am", rank, file=sys.stderr)
        assert rank + 1 == 1

    @pytest.mark.ranks(2)
    def test_lock(lock):
        pass

    @pytest.mark.ranks(2, timeout=startup_timeout_s(2))
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

    @pytest.mark.ranks(1)
    @given(st.booleans())
    def test_given(drawn):
        pass

    def doubled(test):
        @functools.wraps(test)
        def twice(*args, number, **kwargs):
            return test(*args, number=2 * number, **kwargs)
        return twice

    class TestOfClass:
        word = "mine"

        @given_ranks(ranks=2, max_examples=8, number=st.integers(0, 9))
        @doubled
        def test_drawn(self, number):
            assume(number != 12)
            total = torch.tensor([number])
            dist.all_reduce(total)
            assert self.word == "mine"
            assert total.item() <= 22

        @staticmethod
        @pytest.mark.ranks(1)
        def test_static(ranks):
            assert ranks == dist.get_world_size()

    sizes = st.sampled_from([2, 3, 5, 400])

    @given_ranks(sizes.map(lambda size: RankLayout([size], ["tp"])), max_ranks=64, max_examples=8)
    def test_some_left_out(layout):
        assert dist.get_world_size() == layout.size <= 4

    @pytest.mark.xfail(strict=True)
    @given_ranks(st.just(RankLayout([8], ["tp"])))
    def test_all_left_out(layout):
        raise AssertionError(layout)

    class TestCase(unittest.TestCase):
        @given_ranks(st.booleans(), ranks=2, max_examples=1)
        def test_of_unittest(self, drawn):
            self.assertEqual(dist.get_world_size(), 2)

    def size():
        print("one of", dist.get_world_size())
        return dist.get_world_size()

    def test_function(run_ranks):
        more = 1
        assert run_ranks(size, 2) == [2, 2]
        assert run_ranks(lambda: dist.get_rank() + more, 2) == [1, 2]
        assert run_ranks(max, 1, args=(3, 5)) == [5]

    def test_many(run_ranks):
        run_ranks(size, 5)

    def test_unmarked(ranks):
        pass
"""

pytestmark = pytest.mark.full


def run_pytest(folder, *arguments):
    """Run pytest on a folder as a separate project."""
    plugins = ["-p", pytest_plugin.__name__, "-p", "no:cacheprovider"]
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests.parent), str(tests)])
    given = {"folder": folder, "COLUMNS": "400", "PYTHONPATH": paths}
    done = run_python("-m", "pytest", *plugins, *arguments, **given)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return the output of pytest for TESTS."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_all.py").write_text(textwrap.dedent(TESTS))
    return run_pytest(folder, "-rA", "--max-ranks=4", "--import-mode=importlib")


def about(report, test):
    """Return the part of the output about a test."""
    title = rf"^_+ (?:ERROR at \w+ of )?{re.escape(test)} _+$"
    rest = re.split(title, report, flags=re.MULTILINE)[1]
    return re.split(r"^(?:_+ .* _+|=+ .* =+)$", rest, flags=re.MULTILINE)[0]


# Each size is a separate test on as many ranks. A size that is too large is skipped with the
# reason. given_ranks skips examples that are too large. If all examples are too large, the test is
# skipped.
def test_each_size_is_a_test(report):
    for test in (
        "test_sum[ranks=1]",
        "test_sum[ranks=2]",
        "test_some_left_out",
        "TestOfClass::test_static[ranks=1]",
        "TestCase::test_of_unittest",
        "test_function",
    ):
        assert f"PASSED test_all.py::{test}\n" in report, report
    for size, more in ((400, ""), (5, ""), (8, "; no example has fewer")):
        reason = f"{size} ranks are more than 4; pass --max-ranks={size} to run the test{more}"
        assert re.search(rf"SKIPPED \[\d\] .*: {reason}\n", report)


# The report contains the output of each rank, including output of C code and of tests that pass.
def test_output_of_each_rank(report):
    output = about(report, "test_sum[ranks=2]")
    for rank in (0, 1):
        title = rf"-+ Captured output of rank {rank} call -+"
        assert re.search(rf"{title}\nbelow Python on {rank}\n", output)
    assert "I am 1\n" in about(report, "test_wrong[ranks=2]")
    assert about(report, "test_function").count("one of 2\n") == 2


# A failure shows the traceback of the first failing rank, with values and without frames of
# hypercomm. A hang shows the stacks of all ranks. hypothesis shows the smallest example.
def test_failures_are_reported(report):
    output = about(report, "test_wrong[ranks=2]")
    first = "rank 1 failed: AssertionError: assert (1 + 1) == 1\n"
    start = f'\n{first}Traceback (most recent call last):\n  File "'
    assert output.startswith(start), output
    failure = "in test_wrong\n    assert rank + 1 == 1\nAssertionError: assert (1 + 1) == 1\n"
    assert failure in output
    assert "hypercomm" not in output
    assert "rank 0 had returned\n" in output
    assert f"FAILED test_all.py::test_wrong[ranks=2] - {first}" in report
    output = about(report, "test_hang[ranks=2]")
    assert re.match(
        r"\nrank 1 failed: it had not returned after .*\nrank 1 ran test_hang at", output
    )
    assert len(re.findall(r'test_all.py", line \d+ in test_hang\n', output)) == 2
    assert output.count("before\n") == 2
    output = about(report, "TestOfClass.test_drawn")
    assert "    number=7,\n" in output
    assert "deprecated" not in output


# If a test cannot run on ranks, pytest reports an error with the reason. A body may skip or xfail.
def test_unsupported_tests_are_errors(report):
    output = about(report, "test_lock[ranks=2]")
    assert output.startswith("\nargument 'lock' of test_lock cannot be pickled for its ranks: <unl")
    assert about(report, "test_async[ranks=1]").startswith("\ntest_async[ranks=1] is async")
    assert about(report, "test_given[ranks=1]").startswith("\ntest_given[ranks=1] uses hypothesis")
    assert "the fixture 'ranks' needs a marked test" in about(report, "test_unmarked")
    assert "not today\n" in report
    assert "XFAIL test_all.py::test_xfail[ranks=1] - known\n" in report


# With an invalid marker, the test does not run. Without an option, the number of ranks is limited
# by the machine.
def test_invalid_markers(tmp_path):
    markers = ["()", "('2')", "(2.0)", "(True)", "(0)", "(2, 2)", "(2, tiemout=3)", "(4096)"]
    for number, marker in enumerate(markers):
        text = f"import pytest\n\n@pytest.mark.ranks{marker}\ndef test_it():\n    pass\n"
        (tmp_path / f"test_{number}.py").write_text(text)
    report = run_pytest(tmp_path, "--continue-on-collection-errors", "-rs")
    errors = re.findall(r"^the marker ranks of test_it accepts .*; got .*$", report, re.MULTILINE)
    assert len(errors) == len(markers) - 1
    assert f"4096 ranks are more than {most_ranks()}; " in report


# hypothesis has strategies for the types RankLayout and RankMapping.
@given(st.from_type(RankLayout), st.from_type(RankMapping))
def test_strategies_are_registered_by_type(layout, mapping):
    assert isinstance(layout, RankLayout)
    assert isinstance(mapping, RankMapping)


# A body gets the drawn grid as a live grid, and the same drawn values on each rank.
@given_ranks(grids(max_ranks=3, views=True), st.integers(0, 9), max_examples=4)
def test_body_gets_a_live_grid(grid, number):
    assert dist.get_world_size() == grid.layout.size
    assert grid[grid.dim_names].sum(number) == number * grid.layout.size


# A grid that is sent to ranks keeps its arguments. A grid of a set cannot be sent.
def test_grid_keeps_its_arguments_on_ranks():
    grid = HyperCommGrid("tp=2", name="b", creation="enumerate", world_size=2)

    def body(travelled):
        assert repr(travelled) == repr(grid)
        assert travelled.explain("tp") == grid.explain("tp")
        assert travelled["tp"].sum(1) == 2

    on_ranks.run_body(body, {"travelled": grid}, 2)
    grids = GridSet({"a": "tp=2", "b": "tp=2"}, world_size=2)
    with pytest.raises(LaunchError, match="a grid of a GridSet"):
        on_ranks.run_body(body, {"travelled": grids["b"]}, 2)


# The body can be a closure. The smallest example is reported with the traceback of the first
# failing rank.
def test_example_shrinks():
    most = 2

    @given_ranks(layouts(dim_names=["dp"], max_ranks=3, max_offset=0), max_examples=10)
    def is_wrong(layout):
        assert layout.size < most or dist.get_rank() == 0

    with pytest.raises(
        RankFailedError, match=r"^rank 1 failed: AssertionError: assert .*\nTraceback"
    ) as caught:
        is_wrong()
    assert caught.value.rank == 1
    assert "shape=(2,)" in "".join(caught.value.__notes__)
