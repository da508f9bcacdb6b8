"""Joint creation: batches of several grids, all or none over all ranks that are in one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

import attrs
from torch.distributed import ProcessGroup

from hypercomm.layout import RankLayout
from hypercomm.process_groups.agreement.agreement import Agreement
from hypercomm.process_groups.agreement.steps import Step, Steps, all_or_none, limit_of
from hypercomm.process_groups.owner import Batch

logger = logging.getLogger(__name__)

_CALL = "GridSet.create_pgs()"


def steps_of(
    known: dict[tuple[int, ...], Steps], layouts: Iterable[RankLayout], label: str
) -> Steps:
    """Return the steps of the ranks of some layouts, the same ones for the same ranks."""
    ranks = tuple(sorted(set().union(*(layout.ranks for layout in layouts))))
    if ranks not in known:
        layout = RankLayout([len(ranks)], ["rank"], ranks=ranks)
        known[ranks] = Steps(Agreement(layout, label, None))
    return known[ranks]


def create_jointly(
    steps: Steps, ask: Callable[[], Mapping[str, Batch]], timeout: timedelta | None
) -> dict[str, list[ProcessGroup | None]]:
    """Create what several grids are asked for, on all ranks or on none.

    Args:
        steps: Those of all their ranks.
        ask: Returns what each grid is asked for, by its name.
        timeout: For the whole call; default: the timeout of WORLD.

    Raises:
        PlanMismatchError: Another rank asks for something else, or failed.
        GroupCreationTimeout: A rank did not come in time.
    """
    batches: dict[str, Batch] = {}
    try:
        batches.update(ask())
        for batch in batches.values():
            batch.plan()
        entries = [f"{name}: {told}" for name, batch in batches.items() for told in batch.words()]
    except BaseException as error:
        _forget(batches)
        steps.refuse(error, _CALL)
        raise

    def create(step: Step) -> dict[str, list[ProcessGroup | None]]:
        step = attrs.evolve(step, name=f"{steps.title} {step.name}")  # other than the grids' own
        return {name: batch.create(step) for name, batch in batches.items()}

    def take_back() -> None:
        for name, batch in reversed(batches.items()):
            try:
                batch.take_back()
            except BaseException as error:  # noqa: BLE001 - the others must go too
                logger.warning("taking back what grid %r has created: %s", name, error)

    try:
        return all_or_none(steps, entries, limit_of(timeout), _CALL, create, take_back).get()
    except BaseException:
        _forget(batches)
        raise


def _forget(batches: Mapping[str, Batch]) -> None:
    for batch in batches.values():
        batch.forget()
