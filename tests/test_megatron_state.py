"""Our parallel_state against megatron-core's: every group, rank, getter and error type."""

import math

from hypothesis import event, given, settings
from hypothesis import strategies as st
from megatron_facts import ours, state_of, theirs

ORDERS = (
    "tp-cp-ep-dp-pp",
    "tp-cp-ep-pp-dp",
    "tp-pp-dp",
    "pp-dp-cp-tp-ep",
    "dp-tp-ep-cp-pp",
    "cp-pp-ep-tp-dp",
)


def divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def configurations(draw):
    """Draw a world of 1 to 512 ranks and arguments for it, most of which fit."""
    world_size = draw(
        st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 72, 96, 128, 256, 384, 512])
        | st.integers(1, 512)
    )
    rest, sizes = world_size, {}
    names = ["tensor_model", "pipeline_model", "context"]
    for name in draw(st.permutations(names)):
        sizes[name] = draw(st.sampled_from(divisors(rest)[:6]))
        rest //= sizes[name]
    inner = world_size // sizes["pipeline_model"]
    ep = draw(st.sampled_from(divisors(inner)[:6]))
    etp = draw(st.none() | st.sampled_from(divisors(inner // ep)[:4]))
    arguments = {f"{name}_parallel_size": size for name, size in sizes.items()}
    arguments |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    arguments["order"] = draw(st.sampled_from(ORDERS[:2]) | st.sampled_from(ORDERS))
    edp = inner // (ep * (etp or sizes["tensor_model"])) or 1
    instances = divisors(math.gcd(edp, rest * sizes["context"]))
    arguments["num_distributed_optimizer_instances"] = draw(st.just(1) | st.sampled_from(instances))
    if draw(st.booleans()):
        inner_cp = draw(st.sampled_from(divisors(sizes["context"])))
        levels = [inner_cp, sizes["context"] // inner_cp]
        arguments["hierarchical_context_parallel_sizes"] = levels
    replicas = rest * sizes["context"]
    arguments["hybrid_context_parallel"] = (
        draw(st.booleans()) and replicas & (replicas - 1) == 0 and replicas > 1
    )
    arguments["create_all_gather_group"] = draw(st.booleans())
    arguments["create_gloo_process_groups"] = draw(st.booleans())
    if sizes["pipeline_model"] > 1:
        arguments["virtual_pipeline_model_parallel_size"] = draw(st.none() | st.integers(1, 3))
    return world_size, arguments


def ranks_to_ask(world_size, data):
    """Every rank of a small world, some of a large one."""
    if world_size <= 8:
        return range(world_size)
    drawn = data.draw(st.lists(st.integers(0, world_size - 1), min_size=2, max_size=3, unique=True))
    return {0, world_size - 1, *drawn}


# Each group, list of ranks, size, rank, stage and flag is Megatron's; what Megatron refuses, we
# refuse with an error that its callers catch.
@settings(max_examples=200, deadline=None)
@given(configurations(), st.data())
def test_a_state_is_megatrons(configuration, data):
    world_size, arguments = configuration
    for rank in ranks_to_ask(world_size, data):
        expected = state_of(theirs, world_size, rank, arguments)
        found = state_of(ours, world_size, rank, arguments)
        if isinstance(expected, Exception):
            event("refused")
            assert isinstance(found, type(expected)), f"{expected!r} was {found!r}"
            return
        event("accepted")
        assert not isinstance(found, Exception), f"{found!r}"
        assert {k: (v, expected[k]) for k, v in found.items() if v != expected.get(k)} == {}
        assert found.keys() == expected.keys()
