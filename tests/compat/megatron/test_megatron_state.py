"""Test every group, rank, getter and error type of parallel_state against megatron-core."""

import contextlib
import math
import sys

import pytest
from example_counts import examples
from hypothesis import event, example, given, settings, strategies as st
from megatron_comparison import (
    TAKEN,
    THEIR_FIELDS,
    forget,
    gloo_made_fake,
    ours,
    plain,
    read_globals,
    state_of,
    theirs,
    with_create_group,
)

from hypercomm.compat.megatron import ParallelState, ProcessGroupCollection
from hypercomm.errors import HyperCommError
from hypercomm.testing import fake_world

ORDERS = (
    "tp-cp-ep-dp-pp",
    "tp-cp-ep-pp-dp",
    "tp-pp-dp",
    "pp-dp-cp-tp-ep",
    "dp-tp-ep-cp-pp",
    "cp-pp-ep-tp-dp",
    "tp-cp-dp-pp",
    "dp-tp-pp",
)


GTP_ORDERS = (
    "tp-cp-ep-dp-pp-gtp_remat",
    "gtp_remat-tp-cp-ep-pp-dp",
    "tp-cp-dp-gtp_remat-ep-pp",
)
TAKES_GTP = "gtp_remat_size" in TAKEN


def divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


def three_ranks(ranks):
    """Return the first, the second and the last rank of a pipeline of at least two stages."""
    return list(dict.fromkeys([*ranks[:2], ranks[-1]]))


@st.composite
def configurations(draw):
    """Draw a world of 1 to 512 ranks and arguments for it, most of them valid."""
    world_size = draw(
        st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 72, 96, 128, 256, 384, 512])
        | st.integers(1, 512)
    )
    rest = world_size
    sizes = {}
    names = ["tensor_model", "pipeline_model", "context"]
    has_gtp = TAKES_GTP and draw(st.booleans())
    for name in draw(st.permutations([*names, "gtp"] if has_gtp else names)):
        sizes[name] = draw(st.sampled_from(divisors(rest)[:6]))
        rest //= sizes[name]
    gtp = sizes.pop("gtp", 1)
    inner = world_size // sizes["pipeline_model"]
    ep = draw(st.sampled_from(divisors(inner)[:6]))
    etp = draw(st.none() | st.sampled_from(divisors(inner // ep)[:4]))
    arguments = {f"{name}_parallel_size": size for name, size in sizes.items()}
    arguments |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    arguments["order"] = draw(st.sampled_from(ORDERS[:2]) | st.sampled_from(ORDERS))
    edp = inner // (ep * (etp or sizes["tensor_model"])) or 1
    if has_gtp:
        egtp = draw(st.just(1) | st.sampled_from(divisors(edp)))
        arguments |= {"gtp_remat_size": gtp, "expert_gtp_remat_size": egtp}
        arguments["order"] = draw(st.just(arguments["order"]) | st.sampled_from(GTP_ORDERS))
        event(f"gtp_remat_size {gtp > 1}, expert {egtp > 1}")
    instances = divisors(math.gcd(edp, rest * sizes["context"]))
    arguments["num_distributed_optimizer_instances"] = draw(st.just(1) | st.sampled_from(instances))
    if draw(st.booleans()):
        inner_cp = draw(st.sampled_from(divisors(sizes["context"])))
        levels = [inner_cp, sizes["context"] // inner_cp]
        arguments["hierarchical_context_parallel_sizes"] = levels
    arguments["hybrid_context_parallel"] = draw(st.booleans())
    arguments["create_all_gather_group"] = draw(st.booleans())
    arguments["create_gloo_process_groups"] = draw(st.booleans())
    if sizes["pipeline_model"] > 1:
        arguments["virtual_pipeline_model_parallel_size"] = draw(st.none() | st.integers(1, 3))
        arguments["get_embedding_ranks"] = draw(st.none() | st.just(three_ranks))
    return world_size, {name: value for name, value in arguments.items() if name in TAKEN}


def ranks_to_ask(world_size, data):
    """Return every rank of a small world, or some ranks of a large one."""
    if world_size <= 8:
        return range(world_size)
    drawn = data.draw(st.lists(st.integers(0, world_size - 1), min_size=2, max_size=3, unique=True))
    return {0, world_size - 1, *drawn}


# Each group, list of ranks, size, rank, stage, flag and field of a collection is the same as in
# Megatron, if groups are shared, too, and if a program has replaced `create_group`. If Megatron
# raises, hypercomm raises an error that code for Megatron's error catches.
@pytest.mark.full
@settings(max_examples=examples(200))
@given(configurations(), st.sampled_from(["never", "identical"]), st.booleans(), st.data())
def test_state_matches_megatron(configuration, share, is_replaced, data):
    world_size, arguments = configuration
    for rank in ranks_to_ask(world_size, data):
        expected = state_of(theirs, world_size, rank, arguments)
        with with_create_group(ours) if is_replaced else contextlib.nullcontext():
            found = state_of(ours, world_size, rank, {**arguments, "share": share})
        if isinstance(expected, Exception):
            event("rejected")
            assert isinstance(found, type(expected)), f"{expected!r} was {found!r}"
            return
        event("accepted")
        assert not isinstance(found, Exception), f"{found!r}"
        assert {k: (v, expected[k]) for k, v in found.items() if v != expected.get(k)} == {}
        assert found.keys() == expected.keys()


# from_grid() with the grids of a state returns the same collection as the state.
@given(configurations(), st.sampled_from(["never", "identical"]))
def test_grids_of_a_state_have_its_groups(configuration, share):
    world_size, arguments = configuration
    with (
        fake_world(world_size, world_size // 2),
        contextlib.suppress(HyperCommError),
        ParallelState.create(**arguments, share=share) as state,
    ):
        whole = ProcessGroupCollection.from_state(state)
        found = ProcessGroupCollection.from_grid(state.grids["dense"], state.grids["expert"])
        for name in THEIR_FIELDS:
            groups = [plain(getattr(each, name, None)) for each in (found, whole)]
            assert name == "hcp" or groups[0] == groups[1]


@st.composite
def broken_configurations(draw):
    """Draw arguments with positive sizes that are often invalid, for one of several reasons."""
    world_size = draw(st.sampled_from([12, 16, 24, 48]) | st.integers(1, 64))
    size = st.sampled_from([1, 1, 2, 2, 3, 4])
    arguments = {
        f"{name}_parallel_size": draw(size)
        for name in ("tensor_model", "pipeline_model", "context", "expert_model")
    }
    names = draw(st.lists(st.sampled_from(["tp", "pp", "dp", "ep", "cp"]), unique=True, min_size=1))
    options = {
        "expert_tensor_parallel_size": size,
        "order": st.just("-".join(names)),
        "num_distributed_optimizer_instances": size,
        "hierarchical_context_parallel_sizes": st.lists(size, min_size=1, max_size=2),
        "virtual_pipeline_model_parallel_size": size,
        "hybrid_context_parallel": st.just(True),
        "sharp_enabled_group": st.sampled_from(["dp_replica", "tp"]),
        "pipeline_model_parallel_comm_backend": st.just("gloo"),
    }
    if TAKES_GTP:
        options |= {"gtp_remat_size": size, "expert_gtp_remat_size": size}
    for name in draw(st.lists(st.sampled_from(sorted(options)), unique=True, max_size=3)):
        arguments[name] = draw(options[name])
    return world_size, arguments


# For any invalid arguments, the error is caught by code for Megatron's error, and nothing is left.
# If Megatron accepts the arguments, hypercomm does, too.
@settings(max_examples=examples(400))
@given(broken_configurations())
@example((6, {"tensor_model_parallel_size": 2, "hybrid_context_parallel": True}))
def test_errors_match_megatron(configuration):
    world_size, arguments = configuration
    expected = state_of(theirs, world_size, 0, arguments)
    before = read_globals(ours)
    if TAKES_GTP and "tp" not in arguments.get("order", "tp").split("-"):
        event("an order without tp")  # 0.19 finds "tp" inside "gtp_remat"
        return
    found = state_of(ours, world_size, 0, arguments)
    assert read_globals(ours) == before
    if isinstance(expected, Exception):
        event(type(expected).__name__)
        assert isinstance(found, type(expected)), f"{expected!r} was {found!r}"
    else:
        event("accepted")
        assert found == expected


# Sizes that do not fit raise the error about the sizes even if the state is already initialised.
@pytest.mark.parametrize("module", [ours, theirs])
def test_sizes_are_checked_first(module):
    with fake_world(8), gloo_made_fake(module):
        module.initialize_model_parallel()
        with pytest.raises(RuntimeError, match="8"):
            module.initialize_model_parallel(tensor_model_parallel_size=16)
        forget(module)


RANK_CALLS = ("src_rank", "first_rank", "last_rank", "next_rank", "prev_rank", "groups")


def shift(value, offset):
    """Add an offset to all ranks in a value."""
    if isinstance(value, dict):
        return {key: shift(item, offset) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(shift(item, offset) for item in value)
    return value + offset if isinstance(value, int) else value


# If a model starts at another rank, or has fewer ranks than the job, its groups are the groups of
# Megatron's model of the same size, shifted by the offset. Ranks outside the model have no groups.
@settings(max_examples=examples(60))
@given(configurations(), st.integers(0, 9), st.integers(0, 9), st.data())
def test_offset_shifts_all_ranks(configuration, offset, spare, data):
    world_size, arguments = configuration
    rank = data.draw(st.integers(0, world_size - 1))
    place = {"rank_offset": offset, "local_world_size": world_size}
    expected = state_of(theirs, world_size, rank, arguments)
    found = state_of(ours, world_size + offset + spare, rank + offset, arguments | place)
    if isinstance(expected, Exception):
        assert isinstance(found, type(expected))
        return
    for call, value in expected.items():
        lists_ranks = call.startswith(("_", "field", "ddp", "optimizer"))
        lists_ranks = lists_ranks and not call.startswith(("_MPU", "_VIRTUAL", "_GLOBAL"))
        if lists_ranks or any(word in call for word in RANK_CALLS):
            assert found[call] == shift(value, offset)
        elif not isinstance(value, list | tuple):
            assert found[call] == value
    if spare:
        outside = state_of(
            ours, world_size + offset + spare, world_size + offset, arguments | place
        )
        groups = [name for name in outside if name.startswith("_") and name.endswith("GROUP")]
        assert {outside[name] for name in groups} == {None}


def calls_of_initialisation(world_size):
    """Return the number of Python functions that an initialisation of a fake world calls."""
    calls = []
    with fake_world(world_size):
        sys.setprofile(lambda _, event, __: event == "call" and calls.append(event))
        try:
            ours.initialize_model_parallel(8, 8, create_gloo_process_groups=False)
        finally:
            sys.setprofile(None)
        forget(ours)
    return len(calls)


# An initialisation costs the same in a world of any size: no function is called for each group.
def test_calls_do_not_grow_with_the_world():
    calls_of_initialisation(1024)  # imports modules
    assert calls_of_initialisation(16384) < 1.1 * calls_of_initialisation(1024)
