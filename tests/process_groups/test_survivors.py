"""A grid goes on with the ranks that are left, or with more that came."""

import json
import signal
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
from busy import late_s
from hypercomm.process_groups.agreement.agreement import Agreement
from hypercomm.process_groups.agreement.meeting import End, decide, end_of
from ranks import survivor_ranks
from ranks.mortal_ranks import exit_codes
from store_of_dict import Store

from hypercomm import RankLayout
from hypercomm.process_groups.agreement.survivors import Choice, Heirs


def run_scene(folder, scene, size, *args, victims=(), timeout_s=30):
    """Run a scene on the ranks of a job; what each survivor tells."""
    others = size - len(victims)
    where = (str(folder), size, timeout_s, scene)
    codes = exit_codes(survivor_ranks.take_part, size, *where, *args, others, seconds=90)
    assert codes == [-signal.SIGKILL if rank in victims else 0 for rank in range(size)]
    return {
        rank: json.loads((folder / f"{rank}.json").read_text())
        for rank in {*range(size)} - {*victims}
    }


def sum_of(ranks):
    """What a group sums up to, and its members in their order."""
    return [sum(10**rank for rank in ranks), list(ranks)]


def groups_in(ranks, tp, rank):
    """The groups over tp and dp that a rank is in, where tp counts fastest in a list of ranks."""
    at = ranks.index(rank)
    first = at - at % tp
    return {"tp": sum_of(ranks[first : first + tp]), "dp": sum_of(ranks[at % tp :: tp])}


# One of four dies: the others find out, hear who it was, and communicate over new groups; a second
# dies, and the last two go on in an order of their own.
@pytest.mark.long
def test_one_after_the_other(tmp_path):
    losses = [([3], [0, 1, 2], "tp=1,dp=3"), ([1], [2, 0], "tp=2,dp=1")]
    got = run_scene(tmp_path, "lose", 4, losses, victims=[1, 3])
    for rank, (first, second) in got.items():
        for told, left, ranks, tp in (
            (first, [0, 1, 2], [0, 1, 2], 1),
            (second, [0, 2], [2, 0], 2),
        ):
            failed, waited, found, said, figures, is_in, is_clean = told
            assert failed.startswith(("RuntimeError: ", "DistBackendError: "))
            assert waited < 12
            assert found == left
            assert figures.pop("tp+dp") == sum_of(ranks)
            assert figures == groups_in(ranks, tp, rank)
            assert is_in
            assert is_clean
            assert "\n  kept: none\n  created: tp, dp, tp+dp\n  destroyed: tp, dp, tp+dp" in said
        assert first[3].endswith("\n  lost: 3: tp=1,dp=1")


# Two of eight die, and six go on as they were but for the partner of one, which is spare.
@pytest.mark.long
def test_two_at_once(tmp_path):
    ranks = [0, 1, 4, 5, 6, 7]
    losses = [([2, 3], ranks, "tp=2,dp=3")]
    got = run_scene(tmp_path, "lose", 8, losses, victims=[2, 3])
    for rank, (told,) in got.items():
        _, _, left, _, figures, _, is_clean = told
        assert left == ranks
        assert figures.pop("tp+dp") == sum_of(ranks)
        assert figures == groups_in(ranks, 2, rank)
        assert is_clean


# Of eight, one dies; its partner calls the same and is outside, without groups.
@pytest.mark.long
def test_a_spare_rank(tmp_path):
    ranks = [0, 1, 2, 3, 6, 7]
    got = run_scene(tmp_path, "lose", 8, [([5], ranks, "tp=2,dp=3")], victims=[5])
    for rank, (told,) in got.items():
        _, _, left, said, figures, is_in, is_clean = told
        assert left == [0, 1, 2, 3, 4, 6, 7]
        assert is_in == (rank != 4)
        assert is_clean
        whole = figures.pop("tp+dp")
        if rank == 4:
            assert (whole, figures) == (None, {"tp": None, "dp": None})
        else:
            assert whole == sum_of(ranks)
            assert figures == groups_in(ranks, 2, rank)
        assert said.endswith("\n  lost: 4..5: dp=2")


# One module of a set loses a rank: it goes on without, the other as it is, and both create jointly.
@pytest.mark.long
def test_a_set(tmp_path):
    got = run_scene(tmp_path, "lose_of_a_set", 8, victims=[6])
    for rank, (left, said, encoder, llm, placement, spare, text) in got.items():
        assert left == (None if rank < 4 else [4, 5, 7])
        assert said.startswith("tp=2,dp=2 -> tp=1,dp=3\n")
        ours, theirs = (groups_in([0, 1, 2, 3], 2, rank), None) if rank < 4 else (None, None)
        if rank > 3:
            theirs = groups_in([4, 5, 7], 1, rank)
        for figures, wanted in ((encoder, ours), (llm, theirs)):
            if wanted is None:
                assert set(figures.values()) == {None}
            else:
                twin = next(value for key, value in figures.items() if "twin" in key)
                assert twin == wanted["dp"]
                assert {key: figures[key] for key in wanted} == wanted
        assert (placement, spare) == ("disjoint", [6])
        assert "tp=1,dp=3" in text


# Ranks that were outside come: they call the same. They may go again, in any order.
def test_ranks_that_come(tmp_path):
    got = run_scene(tmp_path, "grow", 8)
    none = {"tp": None, "dp": None}
    for rank, (told, is_clean) in got.items():
        four = groups_in([0, 1, 2, 3], 2, rank) if rank < 4 else none
        two = groups_in([7, 1], 2, rank) if rank in (7, 1) else none
        last = groups_in([0, 1, 6, 7], 4, rank)["tp"] if rank in (0, 1, 6, 7) else None
        assert told == [four, groups_in(list(range(8)), 2, rank), two, {"tp": last}]
        assert is_clean


# A rank that is dead and named all the same: all hear in time who it is, nothing has changed, and
# without it they go on.
@pytest.mark.long
def test_a_dead_rank_in_the_list(tmp_path):
    got = run_scene(tmp_path, "name_the_dead", 4, victims=[2])
    for rank, ((said, missing, waited), kept, figures) in got.items():
        assert "for rank 2 (tp=0, dp=2; host" in said
        assert missing == [2]
        assert waited < 2 + late_s(2)
        assert kept == ["tp=2,dp=2", ["dp", "tp"]]
        assert figures == groups_in([0, 1, 3], 1, rank)


# A rank that waits for one outside is not among the survivors, and they do not wait for it again.
@pytest.mark.long
def test_who_waits_elsewhere(tmp_path):
    got = run_scene(tmp_path, "wait_elsewhere", 4)
    assert [got[rank][0] for rank in (0, 1)] == [[0, 1]] * 2
    assert max(got[rank][1] for rank in (0, 1)) < 2 + 6
    assert "rank 3" in got[2]


# One of four dies, then the first of the rest: each time those that are left make a WORLD of their
# own, in which the grid goes on; what is lost is told in the numbers from before.
@pytest.mark.long
@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_new_world(tmp_path, in_a_file):
    losses = [([2], [0, 1, 3], "tp=1,dp=3"), ([0], [2, 1], "tp=2,dp=1")]
    folder = str(tmp_path) if in_a_file else ""
    got = run_scene(tmp_path, "renew", 4, losses, folder, victims=[0, 2])
    new = {1: 1, 3: 2}  # numbers after the first loss
    for rank, (first, second) in got.items():
        left, here, early, lost, figures, whole, is_in, is_clean = first
        assert (left, here) == ([0, 1, 3], [new[rank], 3, new[rank], 3])
        assert early.startswith("CreationError: this grid (tp=2,dp=2) has numbers of ranks from")
        assert lost == "2: tp=0,dp=1"
        assert whole == 111
        assert figures == groups_in([0, 1, 2], 1, new[rank])
        assert is_in
        assert is_clean
        left, here, _, lost, figures, whole, is_in, is_clean = second
        assert (left, here) == ([1, 2], [new[rank] - 1, 2] * 2)
        assert lost == "0: dp=0"
        assert whole == 11
        assert figures == groups_in([1, 0], 2, new[rank] - 1)
        assert is_in
        assert is_clean


# Who does not come, or means other ranks, is named, and nothing has changed; a rank that is not
# meant is refused.
@pytest.mark.long
def test_a_new_world_without_one(tmp_path):
    *got, (said, works) = run_scene(tmp_path, "renew_without_one", 4).values()
    for rank, (words, missing, waited, total, number, whole) in enumerate(got):
        assert words.startswith("renew_world() of ranks 0..")
        assert "with the same ranks in one order" in words
        assert missing == [[2, 3], [2, 3], [0, 1]][rank]
        assert 2 <= waited < 2 + 3
        assert (total, works) == (1111, 1111)
        assert (number, whole) == ([1, 2, 0][rank], 111)
    assert said.startswith("RankOutsideError: rank 3 is not among ranks, 0..2; only those of the")


# Ranks that go on with different ranks all hear so, whoever comes late; nothing has changed, and
# the next call works.
@pytest.mark.parametrize("late", [-1, 0, 3])
@pytest.mark.parametrize("others", [[3], [2, 3]])
def test_lists_that_differ(tmp_path, late, others):
    lists = [[1, 2, 3] if rank in others else [0, 1, 2, 3] for rank in range(4)]
    got = run_scene(tmp_path, "disagree", 4, lists, late)
    for rank, (said, waited, same, works, again, figures) in got.items():
        assert said.startswith("PlanMismatchError: ranks: "), said
        assert "0..3 " in said
        assert "1..3 " in said
        assert "every rank must give reshape() the same ranks" in said
        assert waited < late_s(5)
        assert same
        assert works == sum_of(range(rank % 2, 4, 2))[0]
        if rank < 3:
            assert again.startswith("tp=2,dp=2 -> tp=1,dp=3\n")
            assert figures == groups_in([0, 1, 2], 1, rank)


# Of many that are missing others are asked at each look: who goes on with other ranks is found
# behind those that are dead.
def test_behind_the_dead():
    store, ranks = Store(), list(range(16))
    heirs = Heirs(Agreement(RankLayout([16], ["dp"]), None, None), ranks)
    other = Choice("host b", "another digest", "0..14", "")
    store.held["/15"] = json.dumps(attrs.asdict(other))
    joined = SimpleNamespace(slot="slot", job=SimpleNamespace(rank=0))
    store.held["place/here/0"] = "1"
    first, second = (store.hold(heirs.elsewhere(joined, "place")) for _ in range(2))
    assert first is None
    assert second.kind == "differs"
    assert "0..15 on rank 0 (host" in second.words
    assert "0..14 on rank 15 (host host b)" in second.words


def rank_that_waits(other, choice):
    """Rank 0 at "place", which goes on with 0..2, and how it looks what another goes on with."""
    store = Store()
    store.held |= {f"/{other}": json.dumps(attrs.asdict(choice)), "place/here/0": "1"}
    heirs = Heirs(Agreement(RankLayout([4], ["dp"]), None, None), [0, 1, 2])
    joined = SimpleNamespace(slot="slot", job=SimpleNamespace(rank=0))
    return store, partial(heirs.elsewhere, joined, "place")


# What a rank goes on with where all others have heard that it comes to nothing is no difference: it
# came late, and will hear so. Where nothing is decided, it is one.
def test_a_late_choice():
    store, elsewhere = rank_that_waits(2, Choice("host b", "another", "0..3", "where it waits"))
    store.hold(decide("where it waits", End("differs", words="of another time")))
    assert store.hold(elsewhere()) is None
    del store.held["where it waits"]
    assert store.hold(elsewhere()).kind == "differs"
    assert store.hold(end_of("where it waits")).kind == "differs"


# A rank that has not heard yet how its own wait has ended spoils nothing for one that has, and went
# on with other ranks.
def test_a_choice_of_one_that_went_on():
    store, elsewhere = rank_that_waits(1, Choice("host b", "another", "0..1", "where it waits now"))
    store.hold(decide("place", End("missing", (2,))))
    assert store.hold(elsewhere()) == End("missing", (2,))
    assert store.hold(end_of("where it waits now")) is None


# The same ranks in another order, or as something else: told as for every reshape.
def test_another_order(tmp_path):
    got = run_scene(tmp_path, "other_targets", 4)
    for rank, (said, waited, figures) in got.items():
        assert figures == groups_in([0, 1, 2, 3], 2, rank)
        if rank < 3:
            assert said.startswith("PlanMismatchError: ranks differ in what they create"), said
            assert "[0,2,1]" in said.replace(" ", "")
            assert waited < late_s(5)
