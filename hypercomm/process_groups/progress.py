"""Progress: what the ranks of a grid count alike, so that they name and compare the same things."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable

from hypercomm.errors import PlanMismatchError
from hypercomm.process_groups import c10d
from hypercomm.process_groups.agreement import Agreement
from hypercomm.process_groups.keys import GroupKey


class Progress:
    """Counts the creations of one grid, and those that failed, as all of its ranks do.

    A creation that failed is tried again under another name, because the store still holds what
    the failed one left.

    Args:
        agreement: What the ranks of the grid have told each other.
        is_verified: Whether each creation is compared, and so has a position.
    """

    def __init__(self, agreement: Agreement, is_verified: bool) -> None:
        self.agreement = agreement
        self.is_verified = is_verified
        self._tries: Counter[GroupKey] = Counter()
        self._batch = 1
        self._batch_tries = 0
        self._position = 0
        self._mismatches: Counter[str] = Counter()

    # ---- names ----------------------------------------------------------------------------------

    def name_of(self, key: GroupKey, batch: str) -> str:
        """Return the name that all ranks know the groups of a key by."""
        if not c10d.is_live():
            return str(key)
        grid, tries = self.agreement.name, self._tries[key]
        if batch:  # no dim name holds a space, so that no key looks like this
            return f"{grid}/{batch}/{key}"
        return f"{grid}/try {tries + 1}/{key}" if tries else f"{grid}/{key}"

    def next_name(self, key: GroupKey) -> None:
        """Give the groups of a key another name from now on."""
        self._tries[key] += 1

    @property
    def batch(self) -> str:
        """What all ranks know the next batch by: only one that has succeeded is counted."""
        tries = self._batch_tries
        return f"batch {self._batch}" + (f" try {tries + 1}" if tries else "")

    def end_batch(self, *, failed: bool) -> None:
        """Count a batch, or that it failed."""
        if failed:
            self._batch_tries += 1
        else:
            self._batch, self._batch_tries = self._batch + 1, 0

    def mark(self) -> Progress:
        """Return what was counted so far, to come back to."""
        marked = copy.copy(self)
        marked._tries, marked._mismatches = self._tries.copy(), self._mismatches.copy()
        return marked

    def return_to(self, marked: Progress) -> None:
        """Count from there again."""
        vars(self).update(vars(marked.mark()))

    def fail(self) -> None:
        """Count a batch that failed on some rank; what was told of it is heard by then."""
        self.agreement.hear(self._compared)
        self.mismatch()
        self.end_batch(failed=True)

    # ---- what is compared -----------------------------------------------------------------------

    def compare(self, words: Iterable[str]) -> None:
        """Compare what a call is about to create with what other ranks create, and count it.

        Args:
            words: An entry for each group; not asked for where there is nobody to compare with.

        Raises:
            PlanMismatchError: They differ.
        """
        if not c10d.has_store():
            return
        entries = list(words)
        try:
            self.agreement.compare(
                self._compared, entries, self._position if self.is_verified else 0
            )
        except PlanMismatchError:
            self.mismatch()
            raise
        self._position += len(entries)

    def uncount(self, entries: int, error: BaseException) -> None:
        """Take back that some entries were counted: a call that fails is made again."""
        if self.is_verified:
            self._position -= entries
        if entries and isinstance(error, PlanMismatchError):  # another rank's: it left word
            self.mismatch()

    def withdraw(self) -> None:
        """Take back what is compared next, which this rank was the first to say, or another was."""
        self.agreement.forget(self._compared)

    def mismatch(self) -> None:
        """Count that ranks differ here, as those do that find out."""
        self._mismatches[self._place] += 1

    @property
    def _compared(self) -> str:
        """Where what comes next is compared."""
        place, tries = self._place, self._mismatches[self._place]
        return f"{place} try {tries + 1}" if tries else place

    @property
    def _place(self) -> str:
        return f"plan {self._position}" if self.is_verified else f"batch {self._batch}"
