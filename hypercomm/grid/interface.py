"""GridInterface: what a grid and its views have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

from torch.distributed import ProcessGroup

from hypercomm.errors import UnknownDimError
from hypercomm.grid import device_mesh
from hypercomm.grid.arguments import (
    CREATIONS,
    SHARES,
    Creation,
    GroupArguments,
    GroupKeywords,
    Share,
    SharedKeywords,
    as_arguments,
    check_keywords,
    check_name,
    check_world,
)
from hypercomm.grid.questions import GridQuestions
from hypercomm.layout.checks import check_choice
from hypercomm.layout.parsing import Dims
from hypercomm.layout.views import View
from hypercomm.process_groups import c10d, world
from hypercomm.process_groups.batches import create_all
from hypercomm.process_groups.explanation import Explanation
from hypercomm.process_groups.job import current_or_none
from hypercomm.process_groups.options import GroupOptions
from hypercomm.process_groups.owner import GroupOwner
from hypercomm.process_groups.planned import PlannedGroup
from hypercomm.process_groups.spec import Derive, GroupKey, GroupSpec, specify

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack  # typing has it from Python 3.11 on


def all_dims(dims: Dims, more: tuple[Dims, ...]) -> Dims:
    """Return what a call was given as its dims, one after the other."""
    return (dims, *more) if more else dims


class GridInterface(GridQuestions):
    """Questions about ranks, and the process groups over the dims of a layout."""

    @property
    def is_destroyed(self) -> bool:
        """Whether the grid was destroyed."""
        return self._owner.is_destroyed

    @property
    def pgs(self) -> Mapping[GroupKey, ProcessGroup | None]:
        """The process groups that exist, by key, in the order of creation; a read-only copy.

        Those of a view are its own, and those over dims that it shares.
        """
        return MappingProxyType({key: planned.group for key, planned in self._plans.items()})

    # ---- process groups -----------------------------------------------------------------------

    def create_pg(
        self,
        dims: Dims,
        *more: Dims,
        name: str | None = None,
        view: str | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        share: Share | None = None,
        derive: Derive | None = None,
        creation: Creation | None = None,
        lazy_init: bool | None = None,
    ) -> ProcessGroup | None:
        """Create the process groups over some dims, and return the calling rank's.

        Every rank of the grid must call this, in the same order; ranks outside may.

        Args:
            dims: One name, or several in any order: "dp+cp", ["dp", "cp"], or one after the other.
            more: Further dims.
            name: Files a further group over the same dims, such as a gloo twin.
            view: The view whose dims they are, as registered; default: the grid's own dims. Dims
                that the view shares give the grid's own groups.
            backend: Backend of this group; default: the grid's.
            timeout: Default: the timeout of WORLD.
            pg_options: Options of the backend, such as `ProcessGroupNCCL.Options`.
            group_desc: A description that torch's logs show; default: the dims.
            share: Overrides the grid's.
            derive: Makes other groups of those over `dims`, such as the ends of each pipeline:
                `lambda groups: groups.pick(lambda ranks: (ranks[0], ranks[-1]))`. Needs a name.
            creation: Overrides the grid's, as does `lazy_init`: where WORLD is bound to a device,
                dims that cover the world may be split off it, and "pp" created lazily.
            lazy_init: Whether members connect at their first message.

        Returns:
            A plain torch `ProcessGroup`, or None on a rank that is in none of the groups. Mind
            that torch's collectives take None for WORLD.

        Raises:
            GroupExistsError: A group for this key was created before (a KeyError).
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
            UnknownViewError: There is no such view.
            GroupOptionsError: An option is wrong, or would be dropped.
            GroupCreationTimeout: Members did not come in time; names them. All may try again.
            GridMismatchError: Another rank means another grid; names both.
            PlanMismatchError: With `verify`, another rank creates something else here.
            CreationError: The grid's way of creating groups cannot work here, members could not
                connect, or the job's store is gone.
            NotInitializedError: torch.distributed is not initialised.
            GridDestroyedError: The grid was destroyed.
            ForkedError: The grid belongs to the process that forked this one.
        """
        keywords: GroupKeywords = {"name": name, "view": view, "backend": backend}
        keywords |= {"timeout": timeout, "pg_options": pg_options, "group_desc": group_desc}
        keywords |= {"share": share, "derive": derive, "creation": creation, "lazy_init": lazy_init}
        return self._state.owner.create(self._spec(all_dims(dims, more), keywords))

    def plan_pg(self, dims: Dims, *more: Dims, **keywords: Unpack[GroupKeywords]) -> PlannedGroup:
        """Check everything about some process groups now, to create them later.

        Every rank of the grid must call this, in the same order. Takes what `create_pg` takes,
        and raises what it raises before it creates anything.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     planned = grid.plan_pg("dp")
            ...     print(planned.size(), planned.rank(), len(grid.pgs), planned.create().size())
            4 2 0 4
        """
        return self._owner.plan(self._spec(all_dims(dims, more), keywords, "plan_pg"))

    def get_pg(
        self, dims: Dims, *more: Dims, name: str | None = None, view: str | None = None
    ) -> ProcessGroup | None:
        """Look up a process group that was created before; never communicates.

        Returns:
            The group, or None on a rank outside the grid, as `create_pg`.

        Raises:
            GroupMissingError: It was not created (a KeyError).
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
            GridDestroyedError: The grid was destroyed.
        """
        return self._owner.get(self._key(all_dims(dims, more), name, view)[0])

    def ensure_pg(
        self, dims: Dims, *more: Dims, **keywords: Unpack[GroupKeywords]
    ) -> ProcessGroup | None:
        """Create a process group on the first call, and return the same one afterwards.

        Takes what `create_pg` takes, and raises what it raises, but for a key that exists.

        Raises:
            GroupOptionsError: The options given, or the groups derived, differ from those of the
                first call.
        """
        return self._owner.ensure(self._spec(all_dims(dims, more), keywords, "ensure_pg"))

    @overload  # a str is an iterable of dims, and a mapping one of its keys
    def create_pgs(  # type: ignore[overload-overlap]
        self, requests: Mapping[str, Dims | GroupArguments], **keywords: Unpack[SharedKeywords]
    ) -> dict[str, ProcessGroup | None]: ...
    @overload
    def create_pgs(
        self, requests: Iterable[Dims | GroupArguments], **keywords: Unpack[SharedKeywords]
    ) -> list[ProcessGroup | None]: ...
    def create_pgs(
        self,
        requests: Mapping[str, Dims | GroupArguments] | Iterable[Dims | GroupArguments],
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        share: Share | None = None,
    ) -> dict[str, ProcessGroup | None] | list[ProcessGroup | None]:
        """Create several process groups in one call, in the order given, all or none.

        Every rank of the grid must call this with the same list; ranks outside may. A rank whose
        list differs from that of the rank that came first learns so before it creates anything.
        If one group fails on a rank, that rank destroys those of the call that it has.

        Args:
            requests: For each group its dims, or a mapping of arguments of `create_pg` by name:
                `["tp", ["dp", "cp"], {"dims": "dp", "name": "gloo", "backend": "gloo"}]`. Or a
                dict of these, by what the caller calls them.
            backend: As for `create_pg`, where a request does not say; so are the other two.
            timeout: Of each group; the longest is that of the whole call.
            share: Groups of the same call may share too.

        Returns:
            For each request what `create_pg` returns; a dict for a dict.

        Raises:
            GroupExistsError: A key is there twice, or was created before; nothing was created.
            PlanMismatchError: Another rank's list differs; says where.
            LayoutError, GroupOptionsError, CreationError: As for `create_pg`.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
            ...     tp, dp_cp = grid.create_pgs(["tp", ["dp", "cp"]])
            ...     print(tp.size(), dp_cp.size(), [str(key) for key in grid.pgs])
            2 4 ['tp', 'cp+dp']
        """
        self._owner.check_alive()
        named = isinstance(requests, Mapping) and "dims" not in requests  # else a lone request
        wanted = requests.values() if isinstance(requests, Mapping) and named else requests
        every = as_arguments(wanted, backend=backend, timeout=timeout, share=share)
        groups = create_all(self._owner, [self._spec(*each) for each in every])
        return dict(zip(requests, groups, strict=True)) if named else groups  # type: ignore[arg-type]

    def explain(self, dims: Dims, *more: Dims, **keywords: Unpack[GroupKeywords]) -> Explanation:
        """Say how the process groups over some dims were created, or would be, and why.

        Creates nothing, and asks nobody. What is said of a key that exists is how it was created,
        whatever is asked for.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     print(grid.explain("dp"))
            dp: 2 of 4 ranks, fake
              local: each rank creates only the groups that it is a member of
              not split: WORLD is not bound to a device: init_process_group(device_id=...) binds it
              not enumerate: it would work too: every rank walks every group of the world
        """
        check_keywords("explain", keywords, GroupKeywords.__annotations__)
        wanted = all_dims(dims, more)
        key, _ = self._key(wanted, keywords.get("name"), keywords.get("view"))
        planned = self._owner.planned.get(key)
        spec = self._spec(wanted, keywords)
        return self._owner.explain(planned or self._owner.draft(spec, current_or_none()))

    def device_mesh(
        self,
        *dims: str | Iterable[str],
        device_type: str | None = None,
        flatten: Mapping[str, Sequence[str]] | None = None,
    ) -> DeviceMesh:
        """Hand process groups that exist to a torch DeviceMesh; creates none, and asks nobody.

        A DeviceMesh numbers ranks with its LAST dim varying fastest, a grid with its FIRST: the
        grid tp=2,dp=4 is, in DeviceMesh's order, the mesh (dp, tp). FSDP2, DTensor and
        `parallelize_module` take it; the grid stays the owner of the groups. Clients that are to
        work together take slices of one mesh, `mesh["dp"]` and `mesh["tp"]`, as torch cannot
        combine two. torch takes meshes with equal ranks and dim names for one: let grids that
        live at the same time and hand out meshes of the same ranks differ in their dim names.

        Args:
            dims: Each dim of the mesh, in the mesh's order: a name, or several whose groups become
                one dim, as ("dp", "cp") becomes "dp_cp". Default: all, the slowest first.
            device_type: "cpu", "cuda", ...; default: that of the mesh that the grid was made of,
                else what the backend of the first dim's groups is for.
            flatten: Dims of the mesh, side by side, that are one under another name, too:
                {"dp_shard_cp": ["dp_shard", "cp"]} gives `mesh["dp_shard_cp"]` the group over both.

        Returns:
            The mesh of the ranks that have the calling rank's coordinates in all other dims.

        Raises:
            GroupMissingError: A group was not created; says how (a KeyError).
            RankOutsideError: The calling rank is not in the grid.
            OrderError: Write ("dp", "cp") rather than ("cp", "dp"): a group's ranks ascend.
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
            GroupOptionsError: `device_type` is no string.

        Example:
            Rank = tp * 1 + dp * 2: the grid names tp first, the mesh dp.

            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     _ = grid.create_pg("tp"), grid.create_pg("dp")
            ...     mesh = grid.device_mesh("dp", "tp")
            ...     print(grid.coords(), tuple(mesh.get_coordinate()), mesh.mesh.tolist())
            {'tp': 1, 'dp': 2} (2, 1) [[0, 1], [2, 3], [4, 5], [6, 7]]
        """
        self._owner.check_alive()
        device_mesh.check_device_type(device_type)
        try:
            spans = device_mesh.read_dims(self.layout, dims)
        except UnknownDimError:
            self._own_dims(dims[0] if len(dims) == 1 else dims)  # says which view has them
            raise
        joint = device_mesh.read_flatten(spans, flatten)
        rank = world.rank()
        self.layout.coords(rank)  # refuses a rank outside
        flat = {n: self.get_pg(device_mesh.together(spans, parts)) for n, parts in joint.items()}
        groups = [self.get_pg(names) for names in spans]
        own = [group for group in groups if group is not None]
        device_type = device_type or self._state.device_type or c10d.device_type(own[0])
        mesh = device_mesh.as_mesh(self.layout, spans, rank, own, device_type)
        for name, group in flat.items():
            if group is not None:
                c10d.flatten_mesh(mesh, joint[name], name, group)
        self._state.gave_meshes = True
        return mesh

    def destroy_pg(
        self, dims: Dims, *more: Dims, name: str | None = None, view: str | None = None
    ) -> None:
        """Destroy one process group that the grid created, before it destroys the others.

        Every rank of the grid must call this, in the same order among creations of the same key,
        which may be created again. A group that serves other keys too, or belongs to somebody
        else, stays until those go.

        Raises:
            GroupMissingError: It was not created (a KeyError).
            UnknownDimError, LayoutError, UnknownViewError: As for `create_pg`.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     _ = grid.create_pg("tp"), grid.create_pg("dp")
            ...     grid.destroy_pg("tp")
            ...     print([str(key) for key in grid.pgs])
            ['dp']
        """
        key, _ = self._key(all_dims(dims, more), name, view)
        with self._changing():
            self._owner.remove(key)

    @property
    def _plans(self) -> Mapping[GroupKey, PlannedGroup]:
        """What was created."""
        return {key: one for key, one in self._owner.created.items() if self._has(key)}

    def _has(self, key: GroupKey) -> bool:
        """Tell whether a key is one of this view's, or of dims that it shares."""
        view = self._view
        if view is None or key.view == view:
            return True
        return key.view is None and set(key.dims) <= set(self._state.views[view].shared_dims)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Forget what is known of groups that are destroyed or replaced in a `with` block."""
        state = self._state
        if state.gave_meshes and not self._owner.is_destroyed:
            c10d.forget_meshes()
        state.changes += 1
        try:
            yield
        finally:
            state.changes += 1  # what another thread found meanwhile may be gone

    @property
    def _owner(self) -> GroupOwner:
        return self._state.owner

    def _key(self, dims: Dims, name: str | None, view: str | None) -> tuple[GroupKey, View | None]:
        """The key, and the view that was asked for, which may share the dims with the grid."""
        self._state.owner.check_alive()
        if name is not None:
            check_name(name)
        view, views = self._view if view is None else view, self._state.views
        found, ordered = views.find(dims, view)
        key = GroupKey(ordered, name, None if found is None else found.name)
        return key, None if view is None else views.asked(view)

    def _spec(self, dims: Dims, given: GroupKeywords, call: str = "create_pg") -> GroupSpec:
        """Read what a call asks for, with what the grid says where the call does not."""
        if call != "create_pg":  # whose signature says them
            check_keywords(call, given, GroupKeywords.__annotations__)
        key, view = self._key(dims, given.get("name"), given.get("view"))
        of_grid, base = self._state.options, self._state.views.base
        backend, lazy_init = given.get("backend"), given.get("lazy_init")
        if (share := given.get("share")) is not None:
            check_choice("share", share, SHARES)
        if (creation := given.get("creation")) is not None:
            check_choice("creation", creation, CREATIONS)
        options = GroupOptions(
            of_grid.backend if backend is None else backend,
            given.get("timeout"),
            given.get("pg_options"),
            given.get("group_desc"),
            of_grid.lazy_init if lazy_init is None else lazy_init,
            creation,
        )
        if (job := current_or_none()) is not self._state.job and job is not None:
            self._owner.check_numbers(job)
            check_world(base, job.size, "any")
            self._state.job = job
        return specify(key, view, base, given.get("derive"), options, share or of_grid.share)
