"""What real ranks run in the tests of Megatron's names."""

import contextlib
import gc
import threading
import time
import warnings

import torch
import torch.distributed as dist

from hypercomm.compat.megatron import ParallelState, install, parallel_state
from ranks.common import all_reduce_of, given_back, settle, threads_and_files
from ranks.common import tables as registered


def groups_of(state):
    """Each group that a state holds, by the name of its global; those in lists by their place."""
    for name in sorted(set(state.values) - {"_global_process_group_list"}):
        value = state.read(name)
        items = enumerate(value) if isinstance(value, list) else [("", value)]
        items = value.items() if isinstance(value, dict) else items
        for place, group in items:
            if isinstance(group, dist.ProcessGroup):
                yield f"{name}{place}", group


def sums_over_every_group(state):
    """The sum of 2**rank over each group: its binary digits say which ranks took part."""
    return {name: all_reduce_of(2 ** dist.get_rank(), group) for name, group in groups_of(state)}


def cycles(count, arguments):
    """Initialise, all-reduce over every group and destroy, many times; what is left over."""
    state, sums = parallel_state.current.default, []
    for cycle in range(count + 1):
        parallel_state.initialize_model_parallel(**arguments)
        sums.append(sums_over_every_group(state))
        created = len(registered()[0])
        parallel_state.destroy_model_parallel()
        dist.barrier()  # nobody counts while a peer still closes its connections
        gc.collect()
        if cycle == 0:  # torch makes some threads and files at the first collective
            settle()
            before = registered(), threads_and_files()
    return {
        "sums": sums[0],
        "always the same": all(each == sums[0] for each in sums),
        "created": created - len(before[0][0]),
        "before": before[1],
        "after": given_back(before[1]),
        "registered": registered() == before[0],
    }


def two_states():
    """Two configurations in one process: in turns, nested, and each in a thread of its own."""
    wide = ParallelState.create(tensor_model_parallel_size=4, create_gloo_process_groups=False)
    narrow = ParallelState.create(tensor_model_parallel_size=2, create_gloo_process_groups=False)

    def reduce():
        size = parallel_state.get_tensor_model_parallel_world_size()
        return size, all_reduce_of(
            2 ** dist.get_rank(), parallel_state._TENSOR_MODEL_PARALLEL_GROUP
        )

    answers, in_threads = [], {}
    with wide, narrow:
        for _ in range(3):
            for state in (wide, narrow):
                with parallel_state.use(state):
                    answers.append(reduce())
        with parallel_state.use(wide), parallel_state.use(narrow):
            answers.append(reduce())

        def own(name, state):
            with parallel_state.use(state):
                in_threads[name] = reduce()

        threads = [threading.Thread(target=own, args=item) for item in [("w", wide), ("n", narrow)]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return answers, in_threads, parallel_state.is_initialized()


def shared(arguments):
    """With share="identical" there is one group for each distinct set of ranks."""
    before = len(registered()[0])
    with ParallelState.create(**arguments, share="identical") as state:
        sets = {
            tuple(dist.get_process_group_ranks(group))
            for name, group in groups_of(state)
            if not name.endswith("_AG")
        }
        created = len(registered()[0]) - before
        sums = sums_over_every_group(state)
        overlapping = state.values["_DATA_PARALLEL_GROUP_WITH_CP_AG"]
        alone = [name for name, group in groups_of(state) if group is overlapping]
    return len(sets), created, alone, sums, len(registered()[0]) - before


def one_rank_differs():
    """Rank 1 asks for tp=4 in place of tp=2; then all ask for tp=2."""
    before, began = registered(), time.monotonic()
    try:
        parallel_state.initialize_model_parallel(4 if dist.get_rank() == 1 else 2)
    except RuntimeError as error:
        kind = type(error).__name__
    took = time.monotonic() - began
    left = registered() == before and not parallel_state.is_initialized()
    dist.barrier()
    parallel_state.initialize_model_parallel(2)
    group = parallel_state.get_tensor_model_parallel_group()
    total = all_reduce_of(2 ** dist.get_rank(), group)
    parallel_state.destroy_model_parallel()
    return kind, took, left, total


def one_rank_late(late):
    """A creation that one rank comes too late for fails everywhere; then all try it again."""
    before, rank = registered(), dist.get_rank()
    if rank == late:
        dist.barrier()
    try:
        parallel_state.initialize_model_parallel(2, distributed_timeout_minutes=1 / 60)
    except RuntimeError as error:  # our CreationError, or gloo in the late rank
        said = str(error)
    if rank != late:
        dist.barrier()
    left = registered() == before and not parallel_state.is_initialized()
    dist.barrier()
    parallel_state.initialize_model_parallel(2)
    total = all_reduce_of(2**rank, parallel_state.get_data_parallel_group())
    parallel_state.destroy_model_parallel()
    return said, left, total


def train(arguments, ours):
    """A few steps of megatron-core's own tensor parallel layers; the losses, exactly."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if ours:
            install()
        from megatron.core import ModelParallelConfig
        from megatron.core import parallel_state as state
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        state.initialize_model_parallel(**arguments)
        config = ModelParallelConfig(
            tensor_model_parallel_size=arguments["tensor_model_parallel_size"],
            use_cpu_initialization=True,
            params_dtype=torch.float32,
        )
        torch.manual_seed(1)
        options = {"config": config, "init_method": torch.nn.init.xavier_normal_, "bias": True}
        first = ColumnParallelLinear(16, 32, gather_output=False, **options)
        second = RowParallelLinear(32, 16, input_is_parallel=True, skip_bias_add=False, **options)
        parameters = [*first.parameters(), *second.parameters()]
        data = torch.Generator().manual_seed(state.get_data_parallel_rank())
        losses = []
        for _ in range(4):
            batch, target = torch.randn(2, 8, 16, generator=data)
            hidden, _ = first(batch)
            output, _ = second(torch.relu(hidden))
            loss = (output - target).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in parameters:
                    group = state.get_data_parallel_group()
                    dist.all_reduce(parameter.grad, group=group)
                    parameter.sub_(0.05 * parameter.grad / group.size())
                    parameter.grad = None
            losses.append(loss.item().hex())
        state.destroy_model_parallel()
    return state.__name__, losses
