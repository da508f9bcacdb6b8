"""GridLive: what a job that runs asks of a grid: connect, watch, and go on after a loss."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

from hypercomm.connections.connecting import PIPELINES, connect, read_pipelines
from hypercomm.connections.connections import Connections
from hypercomm.connections.items import Plans, in_order
from hypercomm.errors import GroupOptionsError
from hypercomm.grid.shortcuts import GridShortcuts
from hypercomm.layout.reading.checks import check_duration
from hypercomm.process_groups.batches import only_call
from hypercomm.process_groups.survival.roll_call import call_the_roll

if TYPE_CHECKING:
    from hypercomm.tools.blame.watch import Watch


class GridLive(GridShortcuts):
    """Before the first step, while nothing moves, and after a rank is lost."""

    def connect(
        self,
        *,
        pipelines: str | Iterable[str] = PIPELINES,
        timeout: timedelta | None = None,
        progress: bool | None = None,
    ) -> Connections:
        """Connect all process groups that exist, before the first step needs them.

        NCCL, and gloo with `lazy_init`, connect the members of a group at its first collective:
        late in a run, and where a rank is missing, without a word. Every rank of the grid must call
        this, as long as nothing is under way in the groups; those outside need not. The ranks
        first meet, and compare which groups they have, in whatever order each has created them.
        Then the members of each group all-reduce one element, and neighbours in a pipeline send
        each other one, also from the last stage to the first. Keys that share a group count once;
        groups that are only planned are left out.

        After the meeting has timed out nothing has been communicated, and all may call this again.
        After a timeout in a group that group is broken, as torch cannot take a collective back:
        `destroy_pg` it, and create it again, once its members can; all others work. A gloo group
        that was connecting lazily may hold up its own end until its own timeout.

        Args:
            pipelines: Dims whose neighbours are connected, in the groups over each of them alone;
                "pp" where there is no such dim is left out, () stands for none.
            timeout: For the whole call; default: the timeout of WORLD.
            progress: Whether the first rank shows a progress bar, for which rich is needed;
                default: where it is installed, and a terminal looks on.

        Returns:
            For each group that the calling rank is in, and each edge, how long it took, and the
            device memory it took; zeros where there is nobody to connect to: in a group of one
            rank and in a fake world. `print` shows a table.

        Raises:
            PlanMismatchError: Ranks have different groups; nobody has communicated.
            ConnectTimeout: Ranks did not call this, or did not go on; names them and their groups.
            OutcomeUnknownError: The job's store is gone.
            CreationError: Another thread makes such a call, a collective failed, what came back is
                wrong, or the others gave up on this rank: call it again.
            UnknownDimError, LayoutError, GroupOptionsError, MissingPackageError: An argument is
                wrong; nobody was asked.
            GridDestroyedError: The grid was destroyed.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid("tp=2,pp=4", lazy_init=False) as grid:
            ...     _ = grid.create_pgs(["tp", "pp"])
            ...     for row in grid.connect():
            ...         print(row.title, row.ranks, row.seconds)
            tp (4, 5) 0.0
            pp (1, 3, 5, 7) 0.0
            pp edge (5, 7) 0.0
            pp edge (3, 5) 0.0
        """
        self._owner.check_alive()  # before any argument
        wanted = read_pipelines(pipelines, self._connectable_dims())
        with only_call(self._owner):
            return connect(self._owner.steps, self._connectable, wanted, timeout, progress)

    def _connectable_dims(self) -> list[str]:
        """Return the dims of the grid, and of its views."""
        views = (self._state.views[name].layout for name in self._state.views)
        return [dim for layout in (self.layout, *views) for dim in layout.dim_names]

    def _connectable(self, prefix: str = "") -> Plans:
        """Return what `connect` connects, with what the titles begin with."""
        self._owner.check_alive()
        with self._owner.pool.lock:
            self._owner.check_steady()
            return in_order(self._plans.values(), prefix)

    def watch(self, seconds: float, folder: str | os.PathLike[str] = "hypercomm_watch") -> Watch:
        """Write down where this rank is when nothing has moved for a while, for `hypercomm blame`.

        Call it on every rank, between the same collectives, after the groups are created or
        before. From then on every call that a ProcessGroup of this process gets from Python, of
        any grid, is noted (4 to 7 microseconds each), and the last 100 of each group are kept.
        A thread writes them with the stacks of all threads to `hypercomm_watch_RANK.json` when no
        call has started or ended for so long; when things move again, the file goes. Leaving the
        `with` block writes, too, with the exception if there is one.

        Not seen: what C++ calls by itself (DistributedDataParallel's buckets), functional
        collectives (DTensor, compiled code). Not for the capture of CUDA graphs.

        Args:
            seconds: Take less than the groups' timeout: a minute or two.
            folder: Made if it is not there; best on a disk that the hosts share.

        Returns:
            What is left with `with`, or ended with `stop()`.

        Raises:
            WatchError: The seconds or the folder cannot be used, or this process has a watch.
            NotInitializedError: torch.distributed is not initialised.

        Example:
            >>> import json, tempfile
            >>> import torch.distributed as dist
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4") as grid:
            ...     with tempfile.TemporaryDirectory() as folder:
            ...         with grid.watch(60, folder) as watch:
            ...             dist.barrier(group=grid.create_pg("dp"))
            ...         record = json.loads(watch.file.read_text())
            >>> group = record["groups"][0]
            >>> record["rank"], record["why"], group["title"], group["ranks"]
            (5, 'left the watch', 'dp', [1, 3, 5, 7])
            >>> [(call["op"], call["number"]) for call in group["calls"]]
            [('barrier', 1)]
        """
        views = self._state.views
        layouts = {"": views.base, **{name: view.layout for name, view in views.items()}}
        owner = self._owner
        tool = importlib.import_module("hypercomm.tools.blame.watch")
        watch: Watch = tool.Watch(
            seconds, folder, layouts, lambda: {k: one.group for k, one in owner.created.items()}
        )
        return watch

    def survivors(self, timeout: timedelta) -> tuple[int, ...]:
        """Find out who is left of the grid's ranks after a loss: the same answer on all of them.

        Every rank of the grid that is left calls this, once a collective has failed, and then
        `reshape(target, ranks=...)`. Nothing is changed here.

        Args:
            timeout: How long to wait for ranks that do not come: longer than collectives wait, as
                a rank may still be in one with a rank that has come here. Those that have come
                then meet again, at once if all are there; for each 16 that are missing, and for
                one that dies meanwhile, the wait is as long again.

        Returns:
            The ranks that have come, in the order of the layout. One that is alive, and waits for
            something else, is not among them.

        Raises:
            RankOutsideError: The calling rank is not in the grid.
            CreationError: The others have gone on without this rank, which came too late.
            OutcomeUnknownError: The job's store is gone; restart the job.
            GroupOptionsError: `timeout` is no positive timedelta.

        Example:
            >>> from datetime import timedelta
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4") as grid:
            ...     print(grid.survivors(timedelta(seconds=30)))  # a fake world has nobody to ask
            (0, 1, 2, 3, 4, 5, 6, 7)
        """
        owner = self._owner
        owner.check_alive()
        check_duration("timeout", timeout, GroupOptionsError)
        self.coords()  # refuses a rank outside
        of, limit_s = owner.successions.of, timeout.total_seconds()
        return call_the_roll(owner.steps, lambda ranks: of(ranks)[1], limit_s)
