"""A layout that lists many ranks: it stands in the store once, and its digest in the cards."""

import json
import re

import attrs
import pytest
from hypercomm.process_groups.agreement.cards import Card, compare_with, digest_of, take_slot
from hypercomm.process_groups.agreement.whereabouts import Whereabouts
from store_of_dict import Asked, Store

from hypercomm import RankLayout
from hypercomm.errors import CreationError

SIZE = 16_384
SWAPPED = [1, 0, *range(2, SIZE)]
PLACE = "job/grids from 0"


def listed(ranks):
    return RankLayout([8, len(ranks) // 8], ["tp", "dp"], ranks=ranks)


def card(rank, ranks, **others):
    return Card(rank, f"host{rank}", f"kind of {ranks[:2]}", None, listed(ranks), None, **others)


def join(store, own, asked=None):
    return store.hold(take_slot(PLACE, own, (), ()), asked)


# The first rank publishes the layout; the others send a few hundred bytes each, and get as few.
def test_only_the_first_sends_the_layout():
    store, asked = Store(), [Asked() for _ in range(6)]
    for rank, count in enumerate(asked):
        assert join(store, card(rank, SWAPPED), count) == (f"{PLACE}/0", None)
    assert asked[0].sent > 80_000
    assert max(count.sent + count.received for count in asked[1:]) < 2_000
    assert {count.questions for count in asked[1:]} == {1}
    assert len(store.held) == 2


# Layouts that a card can hold stand in it, as they always have.
def test_short_layouts_stand_in_their_card():
    store, short = Store(), card(0, list(range(8))[::-1])
    join(store, short)
    (register,) = store.held.values()
    (text,) = json.loads(register)["first"]["entries"]
    assert json.loads(text)["layout"] == json.loads(short.layout.to_json())


# Whoever differs reads it, and says the same as of layouts that are short; so it does when it
# finds the difference only while it waits.
def test_the_words_of_a_mismatch():
    other = [*range(SIZE - 2), SIZE - 1, SIZE - 2]
    mine, theirs = card(5, other), card(3, SWAPPED)
    store = Store()
    join(store, theirs)
    _, end = join(store, mine)
    assert end.kind == "differs"
    assert end.words == mine.difference(theirs)
    assert end.words.startswith(
        "ranks: with 0 at position 0 on rank 5 (host host5), with 1 at position 0 on rank 3 (host "
    )
    where = Whereabouts(f"{PLACE}/0", theirs.kind, "host4")
    store = Store()
    join(store, theirs)
    end = store.hold(compare_with("slot", mine, where, 4, (), may_be_astray=False))
    assert end.words == attrs.evolve(theirs, rank=4, host="host4").difference(mine)


# The version is compared as before.
def test_another_version():
    store = Store()
    join(store, card(0, SWAPPED, version="0.1"))
    _, end = join(store, card(1, SWAPPED))
    assert re.match(r"hypercomm: \S+ on rank 1 \(host .*, 0.1 on rank 0 \(", end.words)


# What is no layout, or another one than the digest says, is an error that names the key.
@pytest.mark.parametrize("text", ["", "{", "null", "[" * 100_000, listed(range(8)).to_json()])
def test_foreign_layouts(text):
    store = Store()
    join(store, card(0, SWAPPED))
    (key,) = [key for key in store.held if "/layout " in key]
    store.held[key] = text
    with pytest.raises(CreationError, match=re.escape(f"the store's key {key!r} holds ")):
        join(store, card(1, list(range(SIZE))[::-1]))
    assert join(store, card(2, SWAPPED)) == (f"{PLACE}/0", None)  # which need not look


# The same where the digest is right: it is not the name of a layout.
def test_a_digest_of_something_else():
    store, own = Store(), card(0, SWAPPED)
    join(store, own)
    text = json.dumps({"ranks": "none"})
    (key,) = [key for key in store.held if "/layout " in key]
    digest = own.digest
    other = digest_of(text)
    store.held[key.replace(digest[:16], other[:16])] = text
    store.held[f"{PLACE}/0"] = store.held[f"{PLACE}/0"].replace(digest, other)
    with pytest.raises(CreationError, match="hypercomm did not write"):
        join(store, own)


# Where the first rank dies before its layout is there, the others do not wait for it for ever.
def test_a_layout_that_is_never_published():
    store = Store()
    join(store, card(0, SWAPPED))
    (key,) = [key for key in store.held if "/layout " in key]
    del store.held[key]
    with pytest.raises(CreationError, match=r"rank 0 \(host host0\) has a layout that it has not"):
        join(store, card(1, list(range(SIZE))[::-1]))
    assert store.now_s < 3.0
