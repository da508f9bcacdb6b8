"""Ranks of groups by numpy alone: what tests of real ranks expect."""

import numpy as np


def group_of(shape, names, ranks, dims, rank):
    """The ranks of a rank's group over some dims, the first dim fastest; None for one outside.

    `ranks` lists those of the layout, or is the first of them.
    """
    if isinstance(ranks, int):
        ranks = np.arange(np.prod(shape)) + ranks
    ranks = np.reshape(ranks, shape, order="F")
    if rank not in ranks:
        return None
    where = [index[0] for index in np.nonzero(ranks == rank)]
    group = ranks[
        tuple(slice(None) if name in dims else at for name, at in zip(names, where, strict=True))
    ]
    return [int(member) for member in group.ravel(order="F")]


def sum_of(*layout_dims_and_rank):
    """10**member summed over that group; None for a rank outside."""
    members = group_of(*layout_dims_and_rank)
    return None if members is None else sum(10**member for member in members)


def all_groups(table, names, dims):
    """Every group over some dims of a table [coordinate, ...] -> rank, the first dim fastest."""
    inner = [axis for axis, name in enumerate(names) if name in dims]
    outer = [axis for axis in range(table.ndim) if axis not in inner]
    count = int(np.prod([table.shape[axis] for axis in outer], dtype=int))
    lines = table.transpose(*outer, *inner).reshape(count, -1, order="F")
    return [[int(member) for member in line] for line in lines]
