"""Ranks that mean different grids or plans are told so, on real gloo processes."""

import gc
import re
import socket
import warnings

import pytest
from busy import late_s
from hypercomm.process_groups.agreement.meeting import seen_elsewhere
from ranks import agreement_ranks

from hypercomm import HyperCommGrid
from hypercomm.testing import fake_world, run_ranks

HOST = socket.gethostname()
USUAL = [{"dims": "tp"}, {"dims": "dp"}, {"dims": ["tp", "dp"]}]
# Waited for longer than the others wait in verify(): given up before, it would be met there.
OWN = {"dims": "tp", "name": "own", "timeout": 2 * agreement_ranks.SHORT}


# A rank with another tp size, order, offset or set of dims is named within five seconds, with both
# values, by itself or by those that wait for it; nothing is left; and all can build the same grid.
@pytest.mark.long
@pytest.mark.parametrize("comes", [pytest.param("first", marks=pytest.mark.slow), "last"])
@pytest.mark.parametrize(
    ("odd", "arguments", "words"),
    [
        (1, ([4, 1], ["tp", "dp"]), ["shape", "(4, 1)", "(2, 2)"]),
        (2, ([2, 1], ["tp", "dp"]), ["shape", "(2, 1)", "(2, 2)"]),
        (1, ([2, 1], ["tp", "dp"]), ["shape", "(2, 1)", "(2, 2)"]),
        (0, ([2, 2], ["dp", "tp"]), ["dims", "dp-tp", "tp-dp"]),
        (3, ([2, 2], ["tp", "cp"]), ["dims", "tp-cp", "tp-dp"]),
        (1, ([2, 2], ["tp", "dp"], 2), ["rank_offset", "2", "0"]),
        (3, ([2, 2], ["tp", "dp"], 2), ["rank_offset", "2", "0"]),
        (2, ([2, 2], ["tp", "dp"], 0, "gloo"), ["backend", "gloo", "None"]),
    ],
)
def test_another_grid(odd, arguments, words, comes):
    late = 0.5
    delays = [late if (rank == odd) == (comes == "last") else 0 for rank in range(4)]
    got = run_ranks(agreement_ranks.another_grid, 6, args=(odd, arguments, delays), timeout=90)
    for said, waited, is_clean, total in got[:4]:
        assert is_clean
        assert total == 1111
        field, mine, others = words
        assert said.startswith(f"GridMismatchError: {field}: "), said
        assert "; ranks mean different grids, " in said
        told = seen_elsewhere(said)
        assert f" {mine} on rank {odd} (host {HOST})" in told
        assert re.search(rf" {re.escape(others)} on rank [^{odd}] \(host {HOST}\)", told), told
        assert waited < late_s(5)


# In verify mode the first creation that differs is named, on all ranks, long before the timeout.
# Without it, ranks that wait for each other are named when that ends, else by verify().
@pytest.mark.long
@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize(
    ("differing", "position", "creates"),
    [
        (USUAL[:1] + USUAL[2:], 1, "tp+dp over"),
        ([USUAL[0], {"dims": "tp", "name": "again"}, *USUAL[1:]], 1, "tp (again) over"),
        ([USUAL[0], {**USUAL[1], "group_desc": "mine"}, USUAL[2]], 1, "group_desc: "),
        ([USUAL[0], USUAL[2], USUAL[1]], 1, "tp+dp over"),
        (USUAL[:2], 2, "verify()"),
        ([*USUAL, OWN], 3, "tp (own) over"),
    ],
    ids=["skips", "repeats", "options", "reorders", "stops early", "goes on"],
)
def test_another_plan(differing, position, creates, verified):
    args = (3, USUAL, differing, verified)
    got = run_ranks(agreement_ranks.another_plan, 4, args=args, timeout=90)
    first = [told[0] for told in got]
    if creates == "tp (own) over" and verified:
        # Who comes to the position later is told; for the others, all that exists is alike.
        first = [(words, waited) for words, waited in first if words is not None]
        assert first
    if creates == "verify()":
        first = first[:3]  # once theirs have failed, all that exists is alike
    assert all(words is not None and waited < late_s(5) for words, waited in first), first
    if verified:
        for words, _ in first:
            assert words.startswith("PlanMismatchError: "), words
        words = first[-1][0]
        assert f"ranks differ in what they create at position {position}" in words
        assert creates in words
    else:
        kinds = {words.partition(":")[0] for words, _ in first}
        assert kinds <= {"PlanMismatchError", "GroupCreationTimeout"}
        if creates == "group_desc: ":  # they meet all the same
            assert kinds == {"PlanMismatchError"}
            assert all(f"at position {position}, dp over" in words for words, _ in first)
    if creates == "group_desc: ":
        for rank, (words, _) in enumerate(first):
            assert words.startswith("PlanMismatchError: group_desc: "), words
            assert ("here (rank" in words) == (f"here (rank {rank}, host {HOST})" in words)
            assert f"'mine' on rank 3 (host {HOST})" in seen_elsewhere(words)
            assert "timeout" not in words


# Ranks that agree are told nothing, however late one of them is; a rank outside need not ask.
@pytest.mark.long
@pytest.mark.parametrize("verified", [True, False])
def test_agreeing_ranks(verified):
    got = run_ranks(agreement_ranks.agreeing, 5, args=(verified,))
    assert got[0] == [None] * 4
    assert got[1] == [110, 11110, 1010, 1010]
    assert got[4] == [11000, 11110, 10100, 10100]


# Who does not call verify() is named.
def test_not_all_verify():
    got = run_ranks(agreement_ranks.not_all_verify, 4)
    for rank in (0, 1, 3):
        said, waited = got[rank]
        assert said.startswith("GroupCreationTimeout: verify() of the grid tp=2,dp=2 waited ")
        assert waited < 1 + late_s(2)
    assert max(got[rank][1] for rank in (0, 1, 3)) >= 1  # whoever began later hears from the first
    assert "rank 2 (tp=0, dp=1; host " in got[0][0]


# Grids beside each other, and ones that only some ranks have, are no disagreement.
@pytest.mark.long
def test_uneven_grids():
    for _ in range(3):
        got = run_ranks(agreement_ranks.uneven_grids, 4)
        assert got == [[11, 1111, 1111]] * 2 + [[1111, 1111]] * 2


@pytest.fixture(scope="module")
def kind():
    """What the store's keys of a grid begin with."""
    return run_ranks(agreement_ranks.name_of_a_grid, 2)[0]


FOREIGN = ["", "{", "[]", "null", '{"rank": 0}', "[[1], 2]", "\x00", "9" * 5000, "[" * 100_000]


# What no rank of ours wrote is an error that names the key; it crashes nobody, and never passes for
# an agreement.
@pytest.mark.long
@pytest.mark.parametrize("value", FOREIGN)
@pytest.mark.parametrize(
    "key",
    [
        "JOB/grids.planted from 0/0",
        "JOB/{kind}/step 0/0",
        "JOB/{kind}/step 0",
        "JOB/rank 1",
    ],
)
def test_planted_values(kind, key, value):
    key = key.format(kind=kind)
    told = []
    for said, verified, is_clean, total, in_full in run_ranks(
        agreement_ranks.planted, 2, args=(key, value), timeout=60
    ):
        assert is_clean
        assert total == 11
        told += [words for words, _ in (said, verified) if isinstance(words, str)]
        key = in_full
    consequences = ("CreationError: ", "GroupCreationTimeout: ", "PlanMismatchError: ")
    assert all(words.startswith(consequences) for words in told), told
    named = any(f"the store's key {key!r} holds " in words for words in told)
    assert named or value == ""  # which counts as absent where keys are compared and set


# Threads may create at the same time, in any order: each gets its group, a shared one is made once.
def test_threads():
    for sums, is_one, total, left in run_ranks(agreement_ranks.threads, 4, args=(6,), timeout=60):
        assert sums == [1111] * 6
        assert is_one
        assert total in {101, 1010}
        assert left == 1


# A grid that is destroyed while a thread waits: that creation ends, and nothing is left.
def test_destroyed_meanwhile():
    (said, waited), left = run_ranks(agreement_ranks.destroyed_meanwhile, 2)[0]
    assert said.startswith(("GroupCreationTimeout: ", "GridDestroyedError: "))
    assert waited < 1 + late_s(2)
    assert left == 1


# A forked child is refused its parent's groups, and cannot take them from the parent.
def test_a_fork():
    for told, total, left in run_ranks(agreement_ranks.forked, 2):
        for said in told[:3]:
            assert said.startswith("ForkedError: this grid (dp=2) belongs to process ")
        assert told[4] is None
        assert total == 11
        assert left == 1


# abort() waits for nobody, may be called twice, and the grid is then as destroyed.
def test_abort():
    for took, said, left, groups in run_ranks(agreement_ranks.aborted, 2):
        assert took < late_s(1)
        assert said.startswith("GridDestroyedError: ")
        assert (left, groups) == (1, 0)


# Destroying a grid after WORLD is harmless, as often as one likes.
def test_world_goes_first():
    got = run_ranks(agreement_ranks.world_goes_first, 2)
    assert [said.partition(":")[0] for said in got] == ["GridDestroyedError"] * 2


# Ctrl-C ends a creation that waits; it leaves nothing, and can be tried again.
def test_ctrl_c():
    (waited, left, total), other = run_ranks(agreement_ranks.interrupted, 2, timeout=60)
    assert 0.4 < waited < late_s(2)
    assert left == (1, 0)
    assert total == other == 11


# A grid that is collected while its groups live says so, and only then.
def test_a_grid_that_is_forgotten():
    def warned(end):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with fake_world(8):
                grid = HyperCommGrid([2, 4], ["tp", "dp"])
                grid.create_pg("tp")
                grid.create_pg("dp", name="twin")
                end(grid)
                del grid
                gc.collect()
        return [str(warning.message) for warning in caught]

    assert warned(lambda grid: grid.destroy()) == []
    assert warned(lambda grid: grid.abort()) == []
    (words,) = warned(lambda _: None)
    assert words == (
        "a HyperCommGrid (tp=2,dp=4) was collected while its process groups live: tp, dp (twin); "
        "call its destroy(), or use it in a with block"
    )
