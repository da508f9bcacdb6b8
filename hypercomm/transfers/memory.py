"""Which tensors lie in the same memory: by addresses, of however many storages they are.

One memory that is mapped at two addresses is not seen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate

from torch import Tensor


def may_share(one: Tensor, other: Tensor) -> bool:
    """Whether elements of both may be at one address; False for apart ones, columns and rows."""
    if not one.numel() or not other.numel():
        return False
    pitches = {stride * each.element_size() for each in (one, other) for stride in each.stride()}
    return all(_meet(one, other, pitch) for pitch in {0, *pitches})


def _meet(one: Tensor, other: Tensor, pitch: int) -> bool:
    """Whether the bytes of both meet in rows of this pitch laid above each other; 0: one row."""
    extents = []
    for each in (one, other):
        size = each.element_size()
        steps = zip(each.shape, each.stride(), strict=True)
        across = [(n - 1) * step * size for n, step in steps if not pitch or step * size % pitch]
        extents.append(sum(across) + size)
    ahead, behind = other.data_ptr() - one.data_ptr(), one.data_ptr() - other.data_ptr()
    if pitch:
        ahead, behind = ahead % pitch, behind % pitch
        return ahead < extents[0] or behind < extents[1]
    return ahead < extents[0] and behind < extents[1]


class Overlaps:
    """Finds those of some tensors that may share memory with another one.

    Args:
        tensors: By name.

    Example:
        >>> import torch
        >>> room = torch.zeros(6)
        >>> list(Overlaps({"a": room[:2], "b": room[3:]}).with_(room[1:3]))
        ['a']
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        spans = sorted((*_span(tensor), name) for name, tensor in tensors.items() if tensor.numel())
        self._begins = [begin for begin, _, _ in spans]
        self._names = [name for _, _, name in spans]
        self._furthest = list(accumulate((end for _, end, _ in spans), max))

    def with_(self, tensor: Tensor) -> Iterator[str]:
        """List the names of those that may share memory with a tensor, the last in memory first."""
        if not tensor.numel():
            return
        begin, end = _span(tensor)
        at = bisect_left(self._begins, end) - 1
        while at >= 0 and self._furthest[at] > begin:  # further back, all end before it
            if may_share(self._tensors[self._names[at]], tensor):
                yield self._names[at]
            at -= 1


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and the one behind its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()
