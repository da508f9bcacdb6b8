"""Faults of how ranks agree, each as a small program of a simulated job, by their numbers.

T is the timeout of WORLD, ten seconds of virtual time. Every program runs under several schedules,
and where a fault of one rank may come anywhere, at each of its scheduling points.
"""

from datetime import timedelta
from itertools import product

import pytest
import torch.distributed as dist
from simulated_job import (
    AsksLate,
    Dies,
    IsInterrupted,
    LostRequest,
    Pauses,
    attempt,
    gate,
    interrupt_in,
    new_store,
    now,
    simulate_job,
    sleep,
    thread,
)
from simulated_job.invariants import (
    errors,
    false_culprits,
    late_calls,
    partial_groups,
    partial_success,
    unlike_groups,
)

from hypercomm import GridSet, HyperCommGrid, RankLayout, RankMapping
from hypercomm.transfers.consent import consent

T = 10.0
SEEDS = range(8)
QUICK_S = 3.0
"""What is heard at once is heard within this time, long before T."""

seeds = pytest.mark.parametrize("seed", SEEDS)


def seconds(count):
    return timedelta(seconds=count)


def lone(rank):
    return RankLayout([1], ["dp"], rank)


def names_of(groups):
    return [group and (group.group_name, dist.get_process_group_ranks(group)) for group in groups]


def until_it_works(create, most=6):
    """Call again at once until that works, and return how often."""
    for tries in range(1, most + 1):
        if attempt(create).is_ok:
            return tries
    return None


def kinds(run, number):
    return [call.kind for call in run.calls(number)]


def check_sound(run):
    assert run.is_stuck is None, run
    assert [outcome.error for outcome in run.ranks] == [None] * len(run.ranks), run
    assert unlike_groups(run) == [], run


# 1. After a mismatch is heard inside verify(), the next verify() of ranks that agree passes.
@seeds
def test_verify_after_a_mismatch_in_verify(seed):
    def program():
        grid = HyperCommGrid([2, 2], ["tp", "dp"], verify=True)
        grid.create_pg("tp")
        attempt(grid.create_pg, "dp") if dist.get_rank() == 3 else attempt(grid.verify)
        gate("all have heard")
        attempt(grid.verify)
        return grid  # the grid lives as long as its groups

    run = simulate_job(program, 4, seed=seed)
    check_sound(run)
    assert kinds(run, 0) == ["PlanMismatchError"] * 4, run
    assert late_calls(run, QUICK_S) == [], run
    assert kinds(run, 1) == [""] * 4, run


# 2. A call whose own code fails on one rank, before it or others have begun, is made again.
@seeds
def test_own_code_fails_once(seed):
    def program():
        grid, failures = HyperCommGrid([2, 2], ["tp", "dp"]), []

        def derive(groups):
            if dist.get_rank() == 1 and not failures:
                failures.append(1)
                raise OSError("no such file")
            return groups

        def create():
            return grid.create_pgs(["tp", {"dims": "dp", "name": "own", "derive": derive}])

        tries = until_it_works(create)
        return tries, names_of(grid.pgs.values()), grid

    run = simulate_job(program, 4, seed=seed)
    check_sound(run)
    assert all(tries is not None for tries, *_ in run.values()), run
    assert partial_groups(run) == [], run
    assert run.took_s < QUICK_S, run


# 2. The same where derive is read late: it returns what raises when it is looked at.
@seeds
def test_what_is_derived_fails_once(seed):
    def program():
        grid, failures = HyperCommGrid([2, 2], ["tp", "dp"]), []

        def derive(groups):
            if dist.get_rank() == 1 and not failures:
                failures.append(1)
                return groups.pick(lambda _: 1 / 0)
            return groups

        def create():
            return grid.create_pgs(["tp", {"dims": "dp", "name": "own", "derive": derive}])

        return until_it_works(create), grid

    run = simulate_job(program, 4, seed=seed)
    check_sound(run)
    assert all(tries is not None for tries, _ in run.values()), run
    assert partial_groups(run) == [], run
    assert run.took_s < QUICK_S, run


# 3. A rank that interrupted verify() is not there when the others come.
@seeds
@pytest.mark.parametrize("call", ["verify", "reshape"])
def test_an_interrupted_call_goes_on_for_nobody(call, seed):
    def program():
        grid = HyperCommGrid([2, 2], ["tp", "dp"])
        grid.create_pg("tp")
        action, given = {
            "verify": (grid.verify, [seconds(3)]),
            "reshape": (grid.reshape, ["tp=4,dp=1"]),
        }[call]
        if dist.get_rank() == 0:
            interrupt_in(1.0)
        else:
            sleep(2.0)
        attempt(action, *given)
        sizes = str(grid.layout)
        gate("again")
        attempt(action, *given)
        return sizes, grid

    run = simulate_job(program, 4, seed=seed, timeout=seconds(3))
    check_sound(run)
    assert run.ranks[0].calls[0].kind == "KeyboardInterrupt", run
    assert partial_success(run, 0) == [], run
    assert {sizes for sizes, _ in run.values()} == {"tp=2,dp=2"}, run
    assert kinds(run, 1) == [""] * 4, run


# 3. The same in a set's create_pgs.
@seeds
def test_an_interrupted_set_goes_on_for_nobody(seed):
    def program():
        grids = GridSet.tile(2, encoder="tp=1", llm="dp=1")

        def create():
            return grids.create_pgs({"encoder": ["tp"], "llm": ["dp"]}, timeout=seconds(3))

        if dist.get_rank() == 0:
            interrupt_in(1.0)
        else:
            sleep(2.0)
        attempt(create)
        gate("again")
        attempt(create)
        return grids

    run = simulate_job(program, 2, seed=seed)
    check_sound(run)
    assert run.ranks[0].calls[0].kind == "KeyboardInterrupt", run
    assert partial_success(run, 0) == [], run
    assert kinds(run, 1) == ["", ""], run


# 4. What a rank outside a grid calls concerns nobody inside.
@seeds
def test_a_rank_outside_is_compared_with_nobody(seed):
    def program():
        grid = HyperCommGrid([2, 1], ["tp", "dp"], rank_offset=1)
        if dist.get_rank() == 0:
            attempt(grid.create_pgs, ["tp"])
        gate("the rank outside came first")
        if dist.get_rank() != 0:
            attempt(grid.create_pgs, ["tp", "dp"])
        return grid

    run = simulate_job(program, 3, seed=seed)
    check_sound(run)
    assert errors(run) == []


# 5. The same mistake in a second job of one process is heard by all, too.
@seeds
@pytest.mark.parametrize("store", ["same", "new"])
def test_the_same_mistake_in_a_second_job(store, seed):
    def program():
        shape = [2, 1] if dist.get_rank() == 0 else [1, 2]
        for job in ("first", "second"):
            grid = HyperCommGrid(shape, ["tp", "dp"])
            attempt(grid.create_pg, ["tp", "dp"])
            grid.destroy()
            gate(job)
            dist.destroy_process_group()
            own = {"store": new_store("second")} if store == "new" else {}
            dist.init_process_group("gloo", **own)

    run = simulate_job(program, 2, seed=seed)
    check_sound(run)
    assert kinds(run, 0) == kinds(run, 1) == ["GridMismatchError"] * 2, run
    assert late_calls(run, QUICK_S) == [], run


# 6. One stall of one rank costs one call that fails, and one that succeeds.
def test_one_stall_in_a_set_costs_one_call():
    def program():
        grids = GridSet.colocated(3, a="tp=3", b="dp=3")
        tries = until_it_works(
            lambda: grids.create_pgs({"a": ["tp"], "b": ["dp"]}, timeout=seconds(3))
        )
        return tries, grids

    points = simulate_job(program, 3).ranks[2].points
    found = []
    for at in range(1, points + 1):
        run = simulate_job(program, 3, seed=at, faults=[Pauses(2, at, seconds=4.0)])
        check_sound(run)
        tries = [tries for tries, _ in run.values()]
        if None in tries or max(tries) > 2 or partial_groups(run):
            found.append((at, tries, partial_groups(run)))
    assert found == []


# 7. A grid can be built anew after several threads have waited in one that was not the same.
@seeds
def test_threads_of_a_grid_that_differs(seed):
    def program():
        rank = dist.get_rank()
        grid = HyperCommGrid([1, 2] if rank else [2, 1], ["tp", "dp"])

        def other():
            sleep(0.1)  # so that the two look at different times
            attempt(grid.create_pg, ["tp", "dp"], name="other")

        if rank == 0:
            second = thread(other)
            attempt(grid.create_pg, ["tp", "dp"])
            second.join()
        else:
            sleep(1.0)
            attempt(grid.create_pg, ["tp", "dp"])
        grid.destroy()
        gate("again")
        grid = HyperCommGrid([2, 1], ["tp", "dp"])
        again = attempt(grid.create_pg, "tp")
        return again.kind, grid

    run = simulate_job(program, 2, seed=seed)
    check_sound(run)
    assert [kind for kind, _ in run.values()] == ["", ""], run
    assert late_calls(run, QUICK_S) == [], run


# 8. A view that differs is told each time, and so is the batch that differs afterwards.
@seeds
def test_a_view_differs_twice_and_then_a_batch(seed):
    def program():
        grid = HyperCommGrid([2, 2], ["tp", "dp"])
        grid.register_view("e", [4, 1] if dist.get_rank() == 3 else [1, 4], ["ep", "rest"])
        for turn in range(2):
            attempt(grid.create_pgs, [{"dims": ["ep", "rest"], "view": "e"}])
            gate(f"view {turn}")
        attempt(grid.create_pgs, ["dp"] if dist.get_rank() == 3 else [["tp", "dp"]])
        return grid

    run = simulate_job(program, 4, seed=seed)
    check_sound(run)
    for number in range(3):
        assert kinds(run, number) == ["PlanMismatchError"] * 4, run
    assert late_calls(run, QUICK_S) == [], run


# 9. A rank that gives up leaves what others have said.
@seeds
def test_giving_up_deletes_nothing_of_others(seed):
    def program():
        rank = dist.get_rank()
        grid = HyperCommGrid([3, 1], ["tp", "dp"], verify=True)
        if rank == 0:
            attempt(grid.verify, seconds(1))
            attempt(grid.create_pg, "tp", name="x")
        elif rank == 1:
            attempt(grid.verify, seconds(2))
        else:
            sleep(3.0)
            attempt(grid.create_pg, "tp", name="y")
        return grid

    run = simulate_job(program, 3, seed=seed)
    check_sound(run)
    assert run.ranks[2].calls[-1].kind == "PlanMismatchError", run
    assert run.ranks[0].calls[-1].kind == "PlanMismatchError", run
    assert late_calls(run, QUICK_S) == [], run


# 10. A rank that mends its plan deletes nothing that another has told.
@pytest.mark.parametrize("late_s", [0.4 + 0.02 * step for step in range(50)])
def test_mending_deletes_nothing_of_others(late_s):
    def program():
        rank = dist.get_rank()
        grid = HyperCommGrid([2, 2], ["tp", "dp"])
        grid.register_view("e", [4, 1] if rank == 3 else [1, 4], ["ep", "rest"])
        if rank != 3:
            grid.create_pg("ep", view="e")  # of one rank: waits for nobody
        gate("three have used the view")
        if rank == 1:
            sleep(0.5)
            attempt(grid.create_pgs, ["dp"])
        if rank == 3:
            sleep(late_s)
            attempt(grid.create_pg, "rest", view="e")
            return now(), grid
        until_it_works(lambda: grid.create_pgs(["tp"]), 3 if rank == 2 else 4)
        return now(), grid

    run = simulate_job(program, 4, seed=int(100 * late_s))
    check_sound(run)
    views = [call for call in run.ranks[2].calls if "view" in str(call.error)]
    told_s = run.ranks[3].calls[0].began_s
    assert views, run
    assert views[0].began_s + views[0].took_s < told_s + QUICK_S, run


# 11. One question of one rank fails, whichever: all have the new shape, or all the old one, or the
# rank says that it cannot know.
def test_a_reshape_does_not_split():
    def program():
        grid = HyperCommGrid([2, 2], ["tp", "dp"])
        grid.create_pg("tp")
        call = attempt(grid.reshape, "tp=4,dp=1")
        return str(grid.layout), "unknown" in str(call.error), grid

    points = simulate_job(program, 4).ranks[3].points
    found = []
    for at in range(1, points + 1):
        run = simulate_job(program, 4, seed=at, faults=[LostRequest(3, at)])
        if run.ranks[3].error is not None:
            continue  # it came to no reshape
        shapes = {shape for shape, is_unknown, _ in run.values() if not is_unknown}
        if len(shapes) > 1 or late_calls(run, T):
            found.append((at, [shape for shape, *_ in run.values()], late_calls(run, T)))
    assert found == []


# 12. Groups that connect lazily have one name on all ranks, also after a rank was late.
@pytest.mark.parametrize("late_s", [1.5, 3.5, 6.5])
def test_lazy_groups_of_a_set_are_alike(late_s):
    def program():
        grids = GridSet.colocated(3, a="tp=3", lazy_init=True)
        tries = until_it_works(lambda: grids.create_pgs({"a": ["tp"]}, timeout=seconds(3)))
        return tries, grids

    points = simulate_job(program, 3).ranks[1].points
    found = []
    for at in range(1, points + 1):
        run = simulate_job(program, 3, seed=at, faults=[Pauses(1, at, seconds=late_s)])
        check_sound(run)
        if partial_groups(run) or any(tries is None for tries, _ in run.values()):
            found.append((at, [tries for tries, _ in run.values()], partial_groups(run)))
    assert found == []


# 13. A set's call ends within its time on all ranks, and blames those alone that came later.
@seeds
def test_ranks_within_their_own_time_are_not_given_up(seed):
    late_s = dict(enumerate([0.0, 0.8, 1.6, 1.6, 2.4, 2.4, 2.4, 2.4, 0.0]))

    def program():
        grids = GridSet.tile(9, a="tp=2,dp=2,pp=2", b="x=1")
        sleep(late_s[dist.get_rank()] * T)
        attempt(grids.create_pgs, {"a": ["tp", "dp", "pp"], "b": ["x"]}, timeout=seconds(T))
        return grids

    run = simulate_job(program, 9, seed=seed)
    check_sound(run)
    assert partial_success(run, 0) == [], run
    assert late_calls(run, T) == [], run
    assert false_culprits(run, {2, 3, 4, 5, 6, 7}) == [], run


# 14. One rank that misses verify() costs the others hardly more questions where they are many.
def test_questions_do_not_grow_with_the_ranks():
    def program():
        grid = HyperCommGrid([dist.get_world_size()], ["dp"])
        grid.create_pg("dp", derive=lambda groups: groups.chunks(1), name="alone")
        if dist.get_rank() != dist.get_world_size() - 1:
            attempt(grid.verify, seconds(1))
        return grid

    asked = {}
    for count in (8, 64):
        run = simulate_job(program, count)
        check_sound(run)
        assert false_culprits(run, {count - 1}) == [], run
        asked[count] = max(sum(outcome.asked.values()) for outcome in run.ranks)
    assert asked[64] <= asked[8] + 12, asked


# 15. A set's call that fails leaves what another thread has created in one of its grids.
@seeds
def test_a_failed_set_leaves_what_others_have_created(seed):
    def program():
        rank, own = dist.get_rank(), []
        grids = GridSet.tile(3, a="tp=2", b="x=1", share="identical")

        def derive(_):
            raise OSError("no such file")

        def other():
            sleep(1.0)
            own.append(attempt(grids["a"].create_pg, "tp", name="own"))

        requests = {"a": ["tp"], "b": [{"dims": "x", "name": "mine"}]}
        if rank == 2:
            requests["b"][0]["derive"] = derive
            sleep(2.0)
            attempt(grids.create_pgs, requests)
            return "", grids
        second = thread(other)
        attempt(grids.create_pgs, requests)
        second.join()
        return own[0].kind, grids

    run = simulate_job(program, 3, seed=seed)
    check_sound(run)
    assert [kind for kind, _ in run.values()] == ["", "", ""], run
    assert [len(outcome.groups) for outcome in run.ranks] == [1, 1, 0], run


# 16. Threads that ask for lazy_init=None and False on two ranks, in two orders, all succeed.
@seeds
def test_two_ways_to_connect_in_two_threads(seed):
    def program():
        grid = HyperCommGrid([2], ["tp"])
        ways = [("x", None), ("y", False)]

        def create(name, lazily):
            attempt(grid.create_pg, "tp", name=name, lazy_init=lazily)

        order = ways if dist.get_rank() else ways[::-1]
        threads = []
        for name, lazily in order:
            threads.append(thread(lambda name=name, lazily=lazily: create(name, lazily)))
            sleep(0.5)
        for one in threads:
            one.join()
        return grid

    run = simulate_job(program, 2, seed=seed)
    check_sound(run)
    assert errors(run) == []
    assert late_calls(run, QUICK_S) == [], run


# 17. A verified transfer whose ends disagree about who sends ends on all ranks at once; nothing is
# sent, and the next one is right.
@seeds
def test_a_transfer_whose_ends_differ(seed):
    def program():
        mine = [1, 0] if dist.get_rank() == 2 else [0, 1]
        for ranks in (mine, [0, 1]):
            attempt(consent, RankMapping(RankLayout([2], ["tp"], ranks=ranks), lone(2)), "all")

    run = simulate_job(program, 3, seed=seed)
    check_sound(run)
    assert kinds(run, 0) == ["TransferMismatchError"] * 3, run
    assert kinds(run, 1) == [""] * 3, run
    assert late_calls(run, QUICK_S) == [], run


# 17. Ranks that wait for each other in transfers among others, each in its own, hear so at once.
@pytest.mark.parametrize("wrong", [[(0, 2), (1, 0), (2, 1)], [(0, 1), (1, 0), (2, 0)]])
@seeds
def test_transfers_in_a_circle(wrong, seed):
    def program():
        rank = dist.get_rank()
        if rank < len(wrong):
            attempt(consent, RankMapping(lone(wrong[rank][0]), lone(wrong[rank][1])), "all")
        gate("all have heard")
        for pair in ((0, 2), (1, 2), (0, 1)):
            if rank in pair:
                attempt(consent, RankMapping(*map(lone, pair)), "all")

    run = simulate_job(program, 3, seed=seed)
    check_sound(run)
    if (2, 1) in wrong:
        assert kinds(run, 0) == ["TransferMismatchError"] * 3, run
        assert late_calls(run, QUICK_S) == [], run
    assert [kinds(run, number) for number in (1, 2)] == [[""] * 3] * 2, run


# 17. Where another rank is only awaited, nobody can tell until the timeout; then both say where
# they were.
@seeds
def test_a_transfer_among_others(seed):
    def program():
        source = [0, None, 1][dist.get_rank()]
        if source is not None:
            attempt(consent, RankMapping(lone(source), lone(2)), "all")
        gate("all have heard")
        if dist.get_rank() != 1:
            attempt(consent, RankMapping(lone(0), lone(2)), "all")

    run = simulate_job(program, 3, seed=seed)
    check_sound(run)
    for outcome in (run.ranks[0], run.ranks[2]):
        heard, again = outcome.calls
        assert heard.kind == "TransferMismatchError"
        assert "dp=1 at 0 -> dp=1 at 2" in str(heard.error)
        assert "dp=1 at 1 -> dp=1 at 2" in str(heard.error)
        assert again.is_ok
    assert late_calls(run, T) == [], run


# 17. Wherever a rank is interrupted, the others hear so, or all go on; and then all try again.
def test_an_interrupted_transfer():
    def program():
        mapping = RankMapping(lone(0), RankLayout([2], ["dp"], 1))
        attempt(consent, mapping, "all")
        gate("all have heard")
        attempt(consent, mapping, "all")

    all_points = simulate_job(program, 3).ranks[1].points
    for at in range(1, all_points):
        run = simulate_job(program, 3, seed=at, faults=[IsInterrupted(1, at)])
        assert late_calls(run, T) == [], run
        first, second = kinds(run, 0), kinds(run, 1)
        left = ["TransferMismatchError", "KeyboardInterrupt", "TransferMismatchError"]
        if run.ranks[1].error is None:  # else it was interrupted between the two
            all_ways = [([""] * 3, [""] * 3), (left, [""] * 3), ([""] * 3, left)]
            assert (first, second) in all_ways, run


# 17. Ranks that are slow, one behind the other, are accused of nothing; few keys stay.
@seeds
def test_slow_transfers(seed):
    def program(times):
        rank = dist.get_rank()
        for number in range(times):
            for pair in ((0, 1), (1, 2), (0, 2), (2, 3), (1, 3)):
                sleep(T / 40 * ((rank + number + seed) % 4))
                if rank in pair:
                    attempt(consent, RankMapping(*map(lone, pair)), "all")

    for times in (1, 5):
        run = simulate_job(program, 4, args=[times], seed=seed)
        check_sound(run)
        assert errors(run) == [], run
        assert len(run.store.held) <= 5 + 2 * 4, run  # by the sets of ranks, and by the ranks


# 18. What derive returns may not reach beyond the grid; else that is said, and nothing else.
@seeds
def test_derived_ranks_that_the_grid_lacks(seed):
    def program():
        grid = HyperCommGrid([2], ["tp"])
        if dist.get_rank() < 2:
            everyone = RankLayout([4], ["tp"]).groups("tp")
            attempt(grid.create_pg, "tp", name="all", derive=lambda _: everyone, timeout=seconds(2))
        return grid

    run = simulate_job(program, 4, seed=seed)
    check_sound(run)
    allowed = {"GroupOptionsError", "GroupCreationTimeout"}
    assert {call.kind for outcome in run.ranks for call in outcome.calls} <= allowed, run


# 21. A join that was given up takes part in nothing later.
@seeds
@pytest.mark.parametrize("where", ["compare_set"])
def test_a_join_that_was_given_up(where, seed):
    def program():
        wrong = HyperCommGrid([1, 2], ["tp", "dp"])
        if dist.get_rank() == 0:
            attempt(wrong.create_pg, ["tp", "dp"])
        wrong.destroy()
        gate("mended")
        sleep(3.0)
        grid = HyperCommGrid([2, 1], ["tp", "dp"])
        again = attempt(grid.create_pg, ["tp", "dp"])
        return again.kind, again.took_s, grid

    run = simulate_job(program, 2, seed=seed, faults=[AsksLate(0, where, seconds=62.0)])
    check_sound(run)
    assert [kind for kind, *_ in run.values()] == ["", ""], run
    assert max(took for _, took, _ in run.values()) < QUICK_S, run


# 22. A creation by enumeration that fails leaves groups that other threads have made meanwhile.
@seeds
def test_a_failed_enumeration_leaves_other_groups(seed):
    def program():
        made = []
        grid = HyperCommGrid([2], ["tp"], creation="enumerate")
        if dist.get_rank() == 0:

            def other():
                sleep(0.5)
                made.append(dist.new_group([0]))

            second = thread(other)
            attempt(grid.create_pg, "tp", timeout=seconds(1))
            second.join()
        return len(made), grid, made

    run = simulate_job(program, 2, seed=seed)
    check_sound(run)
    assert len(run.ranks[0].groups) == run.values()[0][0] == 1, run


# 23. In a chain of waits, the one that is late is named, not those that wait for it.
@seeds
def test_a_chain_of_waits_names_who_is_late(seed):
    def program():
        grid = HyperCommGrid([4], ["tp"])
        if dist.get_rank() == 3:
            sleep(2 * T)
            return None
        pairs = [[2, 3], [1, 2], [0, 1]]
        for pair in pairs:
            only = RankLayout([2], ["tp"], ranks=pair).groups("tp")
            name = "-".join(map(str, pair))
            call = attempt(grid.create_pg, "tp", name=name, derive=lambda _, only=only: only)
            if not call.is_ok:
                return grid, now()
        return grid, now()

    run = simulate_job(program, 4, seed=seed)
    check_sound(run)
    assert [outcome.calls[-1].kind for outcome in run.ranks[:3]] == ["GroupCreationTimeout"] * 3
    assert false_culprits(run, {3}) == [], run
    assert late_calls(run, T) == [], run


# 23. Whenever a rank dies, those that time out name it; also a rank that has given up, and is gone.
def test_who_died_is_named():
    def program():
        grid = HyperCommGrid([3], ["tp"])
        attempt(grid.create_pg, "tp", timeout=seconds(3))
        return grid

    points = simulate_job(program, 3).ranks[1].points
    found = []
    for at in range(1, points + 1):
        run = simulate_job(program, 3, seed=at, faults=[Dies(1, at)])
        timeouts = [call for call in run.calls(0) if call.kind == "GroupCreationTimeout"]
        found += [call for call in timeouts if 1 not in call.error.missing]
    assert found == []


# 24. A rank that pauses in a reshape is late to one of its steps: the ranks all make the same call,
# are never told that they differ, and reshape together once they call again.
@pytest.mark.parametrize("seconds_of_pause", [T - 0.5, T, T + 0.5])
def test_a_pause_in_a_reshape_is_no_difference(seconds_of_pause):
    def program():
        grid = HyperCommGrid([2, 2], ["tp", "dp"])
        until_it_works(lambda: grid.create_pg("tp"))
        gate("all have it")
        return until_it_works(lambda: grid.reshape("tp=4,dp=1")), str(grid.layout), grid

    points = simulate_job(program, 4).ranks[3].points
    found = []
    for at in range(1, points + 1):
        run = simulate_job(program, 4, seed=at, faults=[Pauses(3, at, seconds=seconds_of_pause)])
        check_sound(run)
        shapes = {shape for _, shape, _ in run.values()}
        calls = [call for rank in run.ranks for call in rank.calls]
        differ = [call for call in calls if "ranks differ" in str(call.error)]
        if differ or shapes != {"tp=4,dp=1"}:
            found.append((at, shapes, differ))
    assert found == []


# 24. So is one that pauses in a transfer which ends with a word of all ranks.
@pytest.mark.parametrize("seconds_of_pause", [T - 0.5, T + 0.5])
def test_a_pause_in_a_state_is_no_difference(seconds_of_pause):
    mapping = RankMapping("dp=4", "tp=4")

    def transfer():
        consent(mapping, "a state")
        consent(mapping, "the end of a state", follows=True)

    def program():
        return until_it_works(transfer)

    points = simulate_job(program, 4).ranks[1].points
    found = []
    for at in range(1, points + 1):
        run = simulate_job(program, 4, seed=at, faults=[Pauses(1, at, seconds=seconds_of_pause)])
        check_sound(run)
        said = [str(call.error) for rank in run.ranks for call in rank.calls if not call.is_ok]
        if None in run.values() or any("different" in words for words in said):
            found.append((at, run.values(), said))
    assert found == []


# 25. Who gives up a group just as its last member comes says who was late, never that nobody was.
@pytest.mark.parametrize("together", [True, False])
def test_members_that_come_at_the_deadline(together):
    def program():
        grid = HyperCommGrid([2, 2], ["tp", "dp"])
        if together:
            until_it_works(lambda: grid.create_pgs(["tp", ["tp", "dp"]]))
        else:
            until_it_works(lambda: grid.create_pg(["tp", "dp"]))
        gate("all have tried")
        return grid

    points = simulate_job(program, 4).ranks[0].points
    runs = [
        simulate_job(program, 4, seed=at, faults=[Pauses(0, at, seconds=late_s)])
        for at, late_s in product(range(1, points + 1), (T - 0.3, T))
    ]
    failed = [call for run in runs for rank in run.ranks for call in rank.calls if not call.is_ok]
    known = {"GroupCreationTimeout", "CreationError", "PlanMismatchError"}
    assert {call.kind for call in failed} <= known
    named = [call.error.missing for call in failed if call.kind == "GroupCreationTimeout"]
    assert named
    assert () not in named


# 25. Nor does it blame others in an attempt for which no time is left.
def test_no_attempt_without_time():
    def program():
        grid = HyperCommGrid([4], ["tp"])
        return until_it_works(lambda: grid.create_pg("tp")), grid

    for seed in range(150):
        run = simulate_job(program, 4, seed=seed, faults=[Pauses(0, 3, seconds=T)])
        check_sound(run)
        assert false_culprits(run, {0}) == [], run
