"""Fates: which groups of a layout a change keeps, and which are gone or new."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.draw.parts.groups_lit import GroupsLit, long_dims
from hypercomm.draw.scenes import ChangeScene, Dims, Result, ranks_of
from hypercomm.layout.text import counted

MOST_RANKS_OF_ALL = 64
"""Up to so many ranks, a picture shows the groups over every dim; else over one."""


@attrs.frozen(eq=False)
class Fate:
    """What becomes of the groups over some dims on one side of a change.

    Args:
        lit: The groups.
        kept: For each of them whether it is on the other side, too.
        otherwise: What it is if not: "gone" or "new".
    """

    lit: GroupsLit
    kept: NDArray[np.bool_]
    otherwise: Result

    def of(self, group: int) -> Result:
        """Return what becomes of a group."""
        return "kept" if self.kept[group] else self.otherwise

    def words(self) -> str:
        """Say how many groups are kept."""
        kept = int(np.count_nonzero(self.kept))
        left = self.lit.count - kept
        told = [f"{count:,} {what}" for count, what in ((kept, "kept"), (left, self.otherwise))]
        groups = f"{counted(self.lit.count, 'group')} of {self.lit.size:,}"
        return f"{groups}: {', '.join(t for t in told if t[:2] != '0 ')}"


def fates(scene: ChangeScene) -> list[tuple[str, Fate | None, Fate | None]]:
    """Return for each dims that a picture shows their name and their groups before and after.

    None where there are no such dims on that side.
    """
    if scene.dims:
        wanted = [scene.dims]
    else:
        every = dict.fromkeys((*long_dims(scene.before), *long_dims(scene.after)))
        wanted = [(dim,) for dim in every]
        if max(scene.before.size, scene.after.size) > MOST_RANKS_OF_ALL:
            changed = [dims for dims in wanted if not _is_kept(scene, dims)]
            wanted = (changed or wanted)[:1]
    return [
        ("+".join(dims), _fate(scene, dims, True), _fate(scene, dims, False)) for dims in wanted
    ]


def _is_kept(scene: ChangeScene, dims: Dims) -> bool:
    return any(change.before == dims and change.result == "kept" for change in scene.changes)


def _fate(scene: ChangeScene, dims: Dims, is_before: bool) -> Fate | None:
    here, there = (scene.before, scene.after) if is_before else (scene.after, scene.before)
    own = tuple(dim for dim in here.dim_names if dim in dims)
    if len(own) < len(dims):
        return None
    lit = GroupsLit(here, own)
    long = tuple(dim for dim in own if here.sizes[dim] > 1)
    otherwise: Result = "gone" if is_before else "new"
    if not long:  # of one rank each, which no change names
        return Fate(lit, np.isin(lit.members()[:, 0], ranks_of(there)), otherwise)
    pairs = [
        (change.before, change.after) if is_before else (change.after, change.before)
        for change in scene.changes
        if change.kept
    ]
    kept = np.zeros(lit.count, dtype=np.bool_)
    for ours, theirs in pairs:
        if ours == long:
            kept |= _same(lit.members(), GroupsLit(there, theirs).members())
    return Fate(lit, kept, otherwise)


def _same(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell for each of our groups whether it is one of theirs; groups are disjoint."""
    found = np.zeros(len(ours), dtype=np.bool_)
    if ours.shape[1] == theirs.shape[1]:
        _, here, there = np.intersect1d(
            ours[:, 0], theirs[:, 0], assume_unique=True, return_indices=True
        )
        found[here] = (ours[here] == theirs[there]).all(axis=1)
    return found
