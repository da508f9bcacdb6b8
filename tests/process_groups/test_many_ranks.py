"""What agreement asks the store where ranks are many: counted, on a dict and a virtual clock."""

import heapq
import random
from functools import partial

import attrs
import pytest
from hypercomm.process_groups.agreement.whereabouts import Whereabouts, key_of, name_late
from store_of_dict import Asked, Store

from hypercomm import RankLayout
from hypercomm.process_groups.agreement import arrival, meeting
from hypercomm.process_groups.job import Job

pytestmark = pytest.mark.any_torch

STEP, SLOT = "step 0", "slot"
HEARS_S = 2.0
"""How long after its deadline a rank returns at the latest."""


@attrs.define
class Rank:
    """A rank that verifies: when it began, what it asked, and how that ended."""

    meeting: object
    began_s: float
    asked: Asked = attrs.field(factory=Asked)
    end: object = None
    ended_s: float = 0.0


def verify(job, layout, limit_s, began_s):
    """What `verify()` asks: the plan is compared, and then all are waited for."""
    said = meeting.Said(job.rank, f"host{job.rank // 8}", ("verify()",))
    yield from meeting.compare(f"{STEP}/0", said, lambda *_: None, STEP)

    def explain(ranks):
        late, words = yield from name_late(job, ranks, layout.ranks, layout)
        return meeting.End("missing", ranks, words, late=late)

    look = partial(meeting.end_of, SLOT)
    arrived = arrival.arrive(STEP, job.rank, layout.ranks, began_s + limit_s, look, explain)
    return (yield from arrived)


def verified(size, missing, limit_s, begins, store=None):
    """Let all but some ranks verify, each from its time on; return them, and the store."""
    layout, store, ranks, due = RankLayout([size], ["dp"]), store or Store(), {}, []
    for rank in set(range(size)) - set(missing):
        job = Job(rank, size, "gloo", True, namespace=f"hypercomm/{size}")
        where = Whereabouts(SLOT, "kind", f"host{rank // 8}")
        store.held[key_of(job, rank)] = where.text()
        begin = begins(rank)
        ranks[rank] = Rank(verify(job, layout, limit_s, begin), begin)
        heapq.heappush(due, (begin, rank, None))
    while due:
        store.now_s, number, answer = heapq.heappop(due)
        rank = ranks[number]
        try:
            answer, at = store.perform(rank.asked, rank.meeting.send(answer))
        except StopIteration as stop:
            (rank.end, pending), rank.ended_s = stop.value, store.now_s
            assert pending is None
        else:
            heapq.heappush(due, (at, number, answer))
    return ranks, store


SIZE = 10_000
drawn = random.Random(0)
MISSING = {
    "nobody": [],
    "the first": [0],
    "the last": [SIZE - 1],
    "one in the middle": [4_711],
    "one that has others below it": [17],
    "it and all below it": [17, *range(17 * 64 + 1, 18 * 64 + 1)],
    "every second one": range(0, SIZE, 2),
    "the first half": range(SIZE // 2),
    "any sixteen": sorted(drawn.sample(range(SIZE), 16)),
}


def at_any_time(size, until_s):
    times = random.Random(1)
    begins = [times.random() * until_s for _ in range(size)]
    return begins.__getitem__


def check_missing(ranks, missing, limit_s):
    """All are told the same, in time, and nobody is accused that came; return what each asked."""
    (end,) = {rank.end for rank in ranks.values()}
    assert end.kind == "missing"
    assert set(end.ranks) <= set(missing)
    assert len(end.ranks) == min(len(missing), arrival.MOST_NAMED)
    assert f"rank {end.ranks[0]} (" in end.words
    assert max(rank.ended_s - rank.began_s for rank in ranks.values()) < limit_s + HEARS_S
    return sorted(rank.asked.questions for rank in ranks.values())


# However many do not come to verify(), and whichever, a rank asks at most 40 questions. One rank
# asks more: it searches for them, and one question tells it one bit, so that one of 10,000 takes 14
# at least, and sixteen 168.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "limit_s"),
    [(name, limit_s) for name in MISSING for limit_s in (30.0, 600.0, 1800.0)],
)
def test_questions_of_ten_thousand(name, limit_s):
    missing = MISSING[name]
    ranks, store = verified(SIZE, missing, limit_s, at_any_time(SIZE, limit_s / 5))
    if not missing:
        assert {rank.end for rank in ranks.values()} == {meeting.AGREED}
        assert max(rank.asked.questions for rank in ranks.values()) <= 25
        last_s = max(rank.began_s for rank in ranks.values())
        heard_s = max(rank.ended_s for rank in ranks.values()) - last_s
        assert heard_s <= max(5.1, limit_s / 16 + 0.1)
    else:
        *others, searching = check_missing(ranks, missing, limit_s)
        assert others[-1] <= 40
        assert searching <= 40 + (32 if len(missing) == 1 else 260)
    assert {key for key in store.held if key.startswith(STEP)} == {STEP, f"{STEP}/0"}


# Nobody asks for all others, but the one that searches: a family at a time, and nearly everyone
# one family.
def test_nobody_asks_for_all():
    ranks, _ = verified(2_000, [], 60.0, at_any_time(2_000, 5.0))
    checked = sorted(rank.asked.checked for rank in ranks.values())
    assert checked[-1] <= 3 * (arrival.FAN_OUT + 1)
    assert checked[len(checked) // 2] <= arrival.FAN_OUT + 1


# All give up at one time: one of them searches, and the others wait for it.
@pytest.mark.parametrize("missing", [[0], [1], [999], [3, 500]])
def test_all_give_up_at_once(missing):
    ranks, _ = verified(1_000, missing, 10.0, lambda _: 0.0)
    *others, searching = check_missing(ranks, missing, 10.0)
    assert others[-1] <= 40 < searching


# Who searches may die meanwhile: the others search themselves a little later.
def test_who_searches_dies():
    store = Store({f"{STEP}/search": "7"})
    ranks, _ = verified(200, [7, 8], 10.0, lambda _: 0.0, store)
    check_missing(ranks, [7, 8], 10.0)


# Ranks of a small job poll twice a second: the first one hears of the last one, and the others of
# the end, at the next poll; so they do where another place has ended.
@pytest.mark.parametrize("size", [2, 8, 64])
def test_a_small_job_hears_soon(size):
    ranks, _ = verified(size, [], 600.0, lambda rank: 100.0 if rank == size - 1 else 0.0)
    assert {rank.end for rank in ranks.values()} == {meeting.AGREED}
    assert max(rank.ended_s for rank in ranks.values()) < 101.1
    differs = meeting.End("differs", words="shape", about=SLOT)
    store = Store({SLOT: meeting.Register(end=differs).text()})
    ranks, _ = verified(size, [0] if size > 2 else [], 600.0, at_any_time(size, 1.0), store)
    assert {rank.end for rank in ranks.values()} <= {differs, meeting.AGREED}
    assert max(rank.ended_s for rank in ranks.values()) < 2.0


# What ends another place is heard in a large job, too, though each rank looks there seldom.
def test_a_large_job_hears_of_another_place():
    differs = meeting.End("differs", words="shape", about=SLOT)
    store = Store({SLOT: meeting.Register(end=differs).text()})
    ranks, _ = verified(2_000, [0], 600.0, at_any_time(2_000, 2.0), store)
    assert {rank.end for rank in ranks.values()} == {differs}
    assert max(rank.ended_s for rank in ranks.values()) < 30.0
