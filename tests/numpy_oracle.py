"""Computes the expected ranks of groups and shards of tensors, with numpy alone."""

import math

import numpy as np


def group_of(shape, names, ranks, dims, rank):
    """Return the ranks in the group of `rank` over `dims`. The first dim varies fastest.

    `ranks` has the ranks of the layout, or only its first rank. The result is None if `rank` is not
    in the layout.
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
    """Return the sum of 10**member over `group_of` the arguments, or None outside the layout."""
    members = group_of(*layout_dims_and_rank)
    return None if members is None else sum(10**member for member in members)


def cuts_of(mapping):
    """Map each split axis of a tensor to the dims that split it. The outermost dim is first."""
    cuts = {} if mapping.along is None else {mapping.batch_axis % 3: [mapping.along]}
    for dim, axis in mapping.shards:
        cuts.setdefault(axis % 3, []).append(dim)
    return cuts


def whole_of(mapping, times=1):
    """Return a full tensor of distinct elements. Source and target can split its axes evenly."""
    shape = [times] * 3
    for axis, dims in cuts_of(mapping).items():
        sides = (mapping.source, mapping.target)
        shape[axis] *= math.lcm(
            *(math.prod(side.size_of(dim, default=1) for dim in dims) for side in sides)
        )
    return np.arange(math.prod(shape)).reshape(shape)


def held(mapping, shape, *, is_source):
    """Map each rank that sends or receives to the indices of its shard along three axes.

    Axes are split as torch.chunk splits them: the last shards may be shorter, or empty.
    """
    layout = mapping.source if is_source else mapping.target
    stage = -1 if is_source != mapping.backward else 0
    found = {}
    for at, rank in enumerate(layout.ranks):
        index = map(int, np.unravel_index(at, layout.shape, order="F"))
        coords = dict(zip(layout.dim_names, index, strict=True))
        pipeline = mapping.pipeline
        if pipeline in coords and coords[pipeline] != stage % layout.size_of(pipeline):
            continue
        axes = [np.arange(length) for length in shape]
        for axis, dims in cuts_of(mapping).items():
            for dim in dims:
                size = -(-len(axes[axis]) // layout.size_of(dim, default=1))
                axes[axis] = axes[axis][size * coords.get(dim, 0) :][:size]
        found[rank] = axes
    return found
