"""What launchers and frameworks take: orders, rankfiles, hostfiles, options."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import check_choice
from hypercomm.layout.placing.traffic import kind_of
from hypercomm.tools.files import as_new_file, write_file
from hypercomm.topology import Topology

_MEGATRON = ("tp", "cp", "ep", "dp", "pp")


def _order(layout: RankLayout, _: Topology) -> str:
    """Megatron's `order` of `initialize_model_parallel`, the first dim varying fastest.

    It makes two grids of one order, megatron/core/parallel_state.py: a dense one, without ep, whose
    dp holds this ep, too, and one of experts, without cp, whose dp holds this cp.
    """
    unknown = [dim for dim in layout.dim_names if dim not in _MEGATRON]
    if unknown:
        raise LayoutError(
            f"Megatron's order knows {list(_MEGATRON)}, and not {unknown[0]!r} of {layout}; write "
            f"the layout instead"
        )
    if tuple(layout.ranks) != tuple(range(layout.size)):
        raise LayoutError(
            f"Megatron numbers its ranks 0, 1, ... in the order of dims, and {layout} has others; "
            f"write the layout instead"
        )
    size = {dim: layout.size_of(dim, default=1) for dim in _MEGATRON}
    if size["ep"] == size["cp"] == 1:
        return "-".join(layout.dim_names)
    order = [dim for dim in layout.dim_names if size[dim] > 1]
    # Without a dp of its own, that of Megatron holds this ep, or this cp, and may stand anywhere.
    tries = [[*order[:at], "dp", *order[at:]] for at in range(len(order), -1, -1)]
    unlike = ""
    for one in tries if size["dp"] == 1 else [order]:
        unlike = _unlike_megatron(layout, size, one)
        if not unlike:
            return "-".join(one)
    raise LayoutError(
        f"Megatron {unlike} the order {'-'.join(order)} of {layout}, as its dense layers know no "
        f"ep and its experts no cp; write the layout instead"
    )


def _unlike_megatron(layout: RankLayout, size: Mapping[str, int], order: Sequence[str]) -> str:
    """Say what Megatron makes of an order that is not as in the layout; nothing: ""."""
    if size["pp"] > 1 and order[-1] != "pp" and size["ep"] != size["cp"]:
        return "needs pp last, unlike in"
    dense = {**size, "dp": size["dp"] * size["ep"], "ep": 1}
    experts = {**size, "dp": size["dp"] * size["cp"], "cp": 1}
    for theirs, merged in ((dense, "ep"), (experts, "cp")):
        grid = RankLayout([theirs[dim] for dim in order], order)
        for dim in order:
            ours = {dim, merged} if dim == "dp" else {dim}
            known = [one for one in layout.dim_names if one in ours]
            # Where no experts are spread, their grid serves pp alone.
            if theirs[dim] == 1 or (theirs is experts and size["ep"] == 1 and dim != "pp"):
                continue
            if not np.array_equal(_by_first(grid, [dim]), _by_first(layout, known)):
                return f"would make other {dim} groups of"
    return ""


def _by_first(layout: RankLayout, dims: Sequence[str]) -> NDArray[np.int64]:
    """The groups over some dims, each in ascending order, by their first rank."""
    groups = np.sort(layout.groups(*dims).to_array(), axis=1)
    return groups[np.argsort(groups[:, 0])]


def _layout(layout: RankLayout, _: Topology) -> str:
    return layout.to_json()


def _hosts(layout: RankLayout, topology: Topology) -> list[str]:
    """The host of each rank of a launch: 0, 1, ... without gaps."""
    host = topology.level("host")
    ranks = np.sort(np.asarray(layout.ranks))
    return [host.names[unit] for unit in host.of_rank[ranks].tolist()]


def _rankfile(layout: RankLayout, topology: Topology) -> str:
    """Open MPI's: mpirun(1), "--map-by rankfile:file=", and before 5.0 --rankfile.

    A slot is a core of the processor; which GPU a rank takes is for LOCAL_RANK to say.
    """
    taken: dict[str, int] = {}
    lines = []
    for rank, host in enumerate(_hosts(layout, topology)):
        lines.append(f"rank {rank}={host} slot={taken.get(host, 0)}")
        taken[host] = taken.get(host, 0) + 1
    return "\n".join(lines)


def _slurm_hostfile(layout: RankLayout, topology: Topology) -> str:
    """The host of each task, for srun --distribution=arbitrary: srun(1), SLURM_HOSTFILE."""
    return "\n".join(_hosts(layout, topology))


def _hostfile(layout: RankLayout, topology: Topology) -> str:
    """Hosts with their GPUs, as Open MPI and DeepSpeed read them."""
    runs: list[list[str | int]] = []
    for host in _hosts(layout, topology):
        if runs and runs[-1][0] == host:
            runs[-1][1] = int(runs[-1][1]) + 1
        else:
            runs.append([host, 1])
    names = [run[0] for run in runs]
    if len({*names}) < len(names):
        raise LayoutError(
            "a hostfile names each host once, but ranks of one host are not beside each other; "
            "write a 'rankfile' or a 'slurm-hostfile'"
        )
    return "\n".join(f"{host} slots={count}" for host, count in runs)


def _sbatch(layout: RankLayout, topology: Topology) -> str:
    """Options for SLURM's topology/block: sbatch(1), --segment, the nodes of each block."""
    hosts, segment, per_host = _counts(layout, topology)
    options = {"nodes": hosts, "ntasks-per-node": per_host, "segment": segment}
    return "\n".join(f"#SBATCH --{name}={value}" for name, value in options.items())


def _nvlink(layout: RankLayout, topology: Topology) -> str:
    """The ranks of a domain, and those of ep in it, as Megatron Bridge's recipes export them."""
    _, segment, per_host = _counts(layout, topology)
    lines = [f"NVLINK_DOMAIN_SIZE={segment * per_host}"]
    for dim in layout.dim_names:
        if kind_of(dim) == "ep":
            units = topology.level("domain").of_rank[layout.groups(dim).to_array()]
            counts = {count for group in units.tolist() for count in Counter(group).values()}
            if len(counts) > 1:
                raise LayoutError(
                    f"{dim} groups have {sorted(counts)} ranks in a domain; they must have equally "
                    f"many in each: leave GPUs out, or change the order of dims"
                )
            lines.append(f"NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN={counts.pop()}")
    return "\n".join(lines)


def _counts(layout: RankLayout, topology: Topology) -> tuple[int, int, int]:
    """The hosts, those of each domain, and the ranks of each host, where all have as many."""
    for name in ("host", "domain"):
        if name not in topology.names:
            raise LayoutError(
                f"segments are of hosts in domains, and this machine has no level {name!r}, but "
                f"{list(topology.names)}"
            )
    used = topology.select(sorted(layout.ranks))
    host, domain = used.level("host"), used.level("domain")
    pairs = np.unique(np.stack([domain.of_rank, host.of_rank]), axis=1)
    per_domain = np.bincount(pairs[0])
    sizes, counts = {*host.sizes.tolist()}, {*per_domain.tolist()}
    if len(sizes) > 1 or len(counts) > 1:
        raise LayoutError(
            f"segments are all of one size, but the domains that are used have {sorted(counts)} "
            f"hosts, and these {sorted(sizes)} ranks; leave GPUs out so that they have as many"
        )
    return host.units, counts.pop(), sizes.pop()


KINDS: dict[str, Callable[[RankLayout, Topology], str]] = {
    "order": _order,
    "layout": _layout,
    "rankfile": _rankfile,
    "slurm-hostfile": _slurm_hostfile,
    "hostfile": _hostfile,
    "sbatch": _sbatch,
    "nvlink-domain": _nvlink,
}
"""What can be written, by name."""


def text_for(kind: str, layout: RankLayout, topology: Topology) -> str:
    r"""Return what a launcher or a framework takes.

    In a rankfile a slot is a core of the processor, not a GPU: a rank takes its GPU by its number
    on its host.

    Args:
        kind: One of `KINDS`.
        layout: The layout.
        topology: The machine; rank r of the layout is its rank r.

    Raises:
        LayoutError: The kind is unknown, or cannot be written for these.

    Example:
        >>> from hypercomm.topology import read_topology
        >>> text_for("hostfile", RankLayout.parse("dp=4"), read_topology({"a": "s", "b": "s"}, 4))
        'a slots=2\nb slots=2\n'
    """
    check_choice("the kind to write", kind, tuple(KINDS), LayoutError)
    return KINDS[kind](layout, topology) + "\n"


def save(text: str, path: str | os.PathLike[str], force: bool = False) -> None:
    """Write a file; one that exists is kept, unless forced.

    Args:
        text: What it will hold.
        path: The file.
        force: Whether one that exists is replaced.

    Raises:
        FileKeptError: It exists.
        LayoutError: It cannot be written.
    """
    file, replaced = as_new_file(path, force, LayoutError)
    write_file(file, text, replaced, LayoutError)
