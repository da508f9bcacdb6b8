"""HyperCommGrid: owns a hyperrectangle of ranks, and the process groups created from it."""

from __future__ import annotations

import html
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm import device_mesh
from hypercomm.errors import GroupOptionsError, HyperCommError, LayoutError, WorldSizeError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_ordered, as_rank, is_utf8, positive
from hypercomm.layout.messages import shown
from hypercomm.layout.notation import format_coords
from hypercomm.process_groups import c10d, world
from hypercomm.process_groups.agreement import Agreement
from hypercomm.process_groups.options import (
    GroupOptions,
    check_backend,
    check_lazy_init,
    check_timeout,
)
from hypercomm.process_groups.owner import (
    Derive,
    Explanation,
    GroupKey,
    GroupOwner,
    GroupRequest,
)
from hypercomm.process_groups.planned import PlannedGroup
from hypercomm.process_groups.strategies import STRATEGIES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self  # typing has it from Python 3.11 on

Creation = Literal["auto", "enumerate", "local", "split"]
Share = Literal["never", "identical"]
Cover = Literal["any", "exact"]


class GroupArguments(TypedDict, total=False):
    """The arguments of one `create_pg`, for `create_pgs`; `dims` must be there."""

    dims: str | Iterable[str]
    name: str | None
    backend: str | None
    timeout: timedelta | None
    pg_options: Any
    group_desc: str | None
    share: Share | None
    derive: Derive | None


class HyperCommGrid:
    """An N-dimensional grid of ranks that creates process groups by dim names.

    The first dim varies fastest, as in Megatron's `order` and opposite to DeviceMesh. The grid
    owns what it creates: `destroy()`, or leaving its `with` block, destroys exactly that.

    Args:
        shape: Size of each dim, in ranks.
        dim_names: Name of each dim, in the order of `shape`.
        rank_offset: The smallest rank, where the grid does not begin at rank 0.
        backend: Backend of the groups; default: that of WORLD.
        name: Tells this grid apart from others; every rank must give the same one. Ranks come to
            grids of one name that overlap in the same order; grids that they come to in different
            orders, in threads for example, need different names.
        cover: "exact" refuses a grid that leaves ranks of the world out.
        creation: How groups are created. "local": each rank creates only its own; "split": each
            rank splits WORLD once, where WORLD is bound to a device; "enumerate": every rank
            walks every group, as torch does; "auto" takes the first of split, local, enumerate
            that works.
        share: "identical" lets keys with the same ranks, backend and options hold one group.
        share_with: Another grid whose groups may serve this one's keys too, under
            `share="identical"`; it stays their owner, and is destroyed after this one.
        world_size: Number of ranks of the job; default: that of torch.distributed, else of the
            environment's WORLD_SIZE.
        lazy_init: True lets the grid's gloo groups connect each pair of ranks at their first
            message, not at the creation, which then waits for nobody; default: as the environment's
            TORCH_GLOO_LAZY_INIT says. torch 2.6 cannot; nccl always does, unless WORLD is bound.
        verify: True compares each creation, with its position, with those of the other ranks, for
            one question to the store each; default: as the environment's HYPERCOMM_VERIFY says.

    Raises:
        LayoutError: As for `RankLayout`.
        WorldSizeError: The grid reaches beyond the world, or leaves ranks out with
            `cover="exact"`.
        NotInitializedError: Nothing tells the world size.
        GroupOptionsError: The backend is unknown, or one of the choices is.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
        ...     dp_cp = grid.create_pg(["dp", "cp"])
        ...     print(grid.coords(), grid.group_ranks(["dp", "cp"]), dp_cp.size())
        {'tp': 1, 'cp': 0, 'dp': 1} (1, 3, 5, 7) 4

    Source: names, signatures and behaviour of `create_pg`, `get_pg`, `get_rank_enum`,
    `_gen_rank_enum` and `_order_dims` follow `megatron.core.hyper_comm_grid`.
    """

    def __init__(
        self,
        shape: Iterable[int],
        dim_names: Iterable[str],
        rank_offset: int = 0,
        backend: str | None = None,
        *,
        name: str | None = None,
        cover: Cover = "any",
        creation: Creation = "auto",
        share: Share = "never",
        share_with: HyperCommGrid | None = None,
        world_size: int | None = None,
        lazy_init: bool | None = None,
        verify: bool | None = None,
    ) -> None:
        layout = RankLayout(shape, dim_names, rank_offset)
        self._setup(
            layout, backend, name, cover, creation, share, share_with, world_size, lazy_init, verify
        )

    @classmethod
    def from_layout(
        cls,
        layout: RankLayout,
        *,
        backend: str | None = None,
        name: str | None = None,
        cover: Cover = "any",
        creation: Creation = "auto",
        share: Share = "never",
        share_with: HyperCommGrid | None = None,
        world_size: int | None = None,
        lazy_init: bool | None = None,
        verify: bool | None = None,
    ) -> Self:
        """Make a grid of a layout, gaps included; the arguments are those of the class.

        Example:
            >>> layout = RankLayout.parse("tp=2,dp=-1", world_size=8)
            >>> HyperCommGrid.from_layout(layout, world_size=8).shape
            [2, 4]
        """
        if not isinstance(layout, RankLayout):
            raise LayoutError(f"from_layout() takes a RankLayout, got {layout!r}")
        grid = cls.__new__(cls)
        grid._setup(
            layout, backend, name, cover, creation, share, share_with, world_size, lazy_init, verify
        )
        return grid

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, *, name: str | None = None) -> Self:
        """Make a grid of a torch DeviceMesh, which stays the owner of its process groups.

        The grid has the mesh's dims in reverse, so that the first varies fastest, and finds the
        mesh's groups under them. What it creates itself it owns; `destroy` leaves the mesh's
        groups alone, and WORLD; they serve no other keys, whatever `share` says. No process group
        is created, and nobody is asked.

        Args:
            mesh: A mesh with dim names, or a slice of one such as `mesh["dp"]`.
            name: As for the class.

        Raises:
            LayoutError: The mesh has no dim names or one that a grid cannot have, its ranks are
                permuted, or a dim of it was made of others that are not neighbours.

        Example:
            >>> from torch.distributed.device_mesh import init_device_mesh
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5):
            ...     mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
            ...     grid = HyperCommGrid.from_device_mesh(mesh)
            ...     print(grid.layout, grid.group_ranks("dp"), grid.get_pg("dp").size())
            tp=2,dp=4 (1, 3, 5, 7) 4
        """
        layout, groups = device_mesh.read_mesh(mesh)
        grid = cls.from_layout(layout, name=name)
        grid._device_type = mesh.device_type
        for dim in layout.dim_names:
            grid._owner.adopt(dim, groups[dim] if groups is not None else None)
        return grid

    def _setup(
        self,
        layout: RankLayout,
        backend: str | None,
        name: str | None,
        cover: str,
        creation: str,
        share: str,
        share_with: HyperCommGrid | None,
        world_size: int | None,
        lazy_init: bool | None,
        verify: bool | None,
    ) -> None:
        _check_choice("cover", cover, ("any", "exact"))
        _check_choice("creation", creation, ("auto", *STRATEGIES))
        _check_choice("share", share, ("never", "identical"))
        check_backend(backend)
        check_lazy_init(lazy_init)
        _check_name(name)
        if share_with is not None and not isinstance(share_with, HyperCommGrid):
            raise GroupOptionsError(f"share_with must be a HyperCommGrid, got {share_with!r}")
        if world_size is not None:
            positive(world_size, "world_size")
        self._world_size = world.world_size(world_size)
        _check_world(layout, self._world_size, cover)
        self.layout = layout
        self.backend = backend
        self.name = name
        self._share = share
        self._lazy_init = lazy_init
        other = None if share_with is None else share_with._owner
        agreement = Agreement(layout, name, backend)
        self._owner: GroupOwner = GroupOwner(
            layout, creation, other, agreement, _is_verified(verify)
        )
        weakref.finalize(self, _warn_of_live, self._owner, layout).atexit = False
        self._device_type: str | None = None
        self._gave_meshes = False

    # ---- what the grid is ---------------------------------------------------------------------

    @property
    def shape(self) -> list[int]:
        """The size of each dim; the first dim varies fastest."""
        return list(self.layout.shape)

    @property
    def dim_names(self) -> list[str]:
        """The name of each dim, in the order of `shape`."""
        return list(self.layout.dim_names)

    @property
    def rank_offset(self) -> int:
        """The smallest rank."""
        return self.layout.rank_offset

    @property
    def size(self) -> int:
        """The number of ranks in the grid."""
        return self.layout.size

    @property
    def pgs(self) -> Mapping[GroupKey, ProcessGroup | None]:
        """The process groups that exist, by key, in the order of creation; a read-only copy."""
        return MappingProxyType(
            {key: created.group for key, created in self._owner.created.items()}
        )

    def is_current_rank_in_grid(self) -> bool:
        """Tell whether the calling rank is in the grid."""
        return world.rank() in self.layout

    def coords(self, rank: int | None = None) -> dict[str, int]:
        """Return the coordinates of a rank, of the calling one by default.

        Raises:
            RankOutsideError: The rank is not in the grid; `is_current_rank_in_grid()` tells.
        """
        return self.layout.coords(world.rank(rank))

    def group_ranks(self, dims: str | Iterable[str], rank: int | None = None) -> tuple[int, ...]:
        """Return the ranks that share a group with a rank, by default the calling one, ascending.

        Raises:
            RankOutsideError: The rank is not in the grid.
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
        """
        groups = self.layout.groups(*self.layout.order_dims(dims))
        rank = as_rank(world.rank(rank))
        self.layout.coords(rank)  # its error speaks of the grid, not of the groups
        return groups.of(rank)

    def get_rank_enum(self, dims: str | Iterable[str]) -> list[list[int]]:
        """Enumerate the groups over some dims, members in ascending rank order.

        Example:
            >>> grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"], world_size=8)
            >>> grid.get_rank_enum(["dp", "tp"])
            [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        dims, _ = self._order_dims(dims)
        return self._gen_rank_enum(dims)

    def _gen_rank_enum(self, dims: Iterable[str]) -> list[list[int]]:
        """Enumerate groups with members in the order of `dims`, the last one varying fastest.

        Example:
            >>> grid = HyperCommGrid([2, 2, 2], ["a", "b", "c"], world_size=8)
            >>> grid._gen_rank_enum(["a", "b"])
            [[0, 2, 1, 3], [4, 6, 5, 7]]
        """
        return self.layout.enumerate_ranks(dims).tolist()  # type: ignore[no-any-return]

    def _order_dims(self, dims: str | Iterable[str]) -> tuple[list[str], str]:
        """Return dims in REVERSED grid order, as Megatron does, and the same joined by dashes."""
        ordered = list(reversed(self.layout.order_dims(dims)))
        return ordered, "-".join(ordered)

    # ---- process groups -----------------------------------------------------------------------

    def create_pg(
        self,
        dims: str | Iterable[str],
        *,
        name: str | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        share: Share | None = None,
        derive: Derive | None = None,
    ) -> ProcessGroup | None:
        """Create the process groups over some dims, and return the calling rank's.

        Every rank of the grid must call this, in the same order; ranks outside may.

        Args:
            dims: One name, or any iterable of names, in any order.
            name: Files a further group over the same dims, such as a gloo twin.
            backend: Backend of this group; default: the grid's.
            timeout: Default: the timeout of WORLD.
            pg_options: Options of the backend, such as `ProcessGroupNCCL.Options`.
            group_desc: A description that torch's logs show; default: the dims.
            share: Overrides the grid's.
            derive: Makes other groups of those over `dims`, such as the ends of each pipeline:
                `lambda groups: groups.pick(lambda ranks: (ranks[0], ranks[-1]))`. Needs a name.

        Returns:
            A plain torch `ProcessGroup`, or None on a rank that is in none of the groups. Mind
            that torch's collectives take None for WORLD.

        Raises:
            GroupExistsError: A group for this key was created before (a KeyError).
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
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
        return self._owner.create(
            self._request(dims, name, backend, timeout, pg_options, group_desc, share, derive)
        )

    def plan_pg(
        self,
        dims: str | Iterable[str],
        *,
        name: str | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        share: Share | None = None,
        derive: Derive | None = None,
    ) -> PlannedGroup:
        """Check everything about some process groups now, to create them later.

        Every rank of the grid must call this, in the same order. Takes what `create_pg` takes,
        and raises what it raises before it creates anything.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     planned = grid.plan_pg("dp")
            ...     print(planned.size(), planned.rank(), len(grid.pgs), planned.create().size())
            4 2 0 4
        """
        return self._owner.plan(
            self._request(dims, name, backend, timeout, pg_options, group_desc, share, derive)
        )

    def get_pg(self, dims: str | Iterable[str], *, name: str | None = None) -> ProcessGroup | None:
        """Look up a process group that was created before; never communicates.

        Returns:
            The group, or None on a rank outside the grid, as `create_pg`.

        Raises:
            GroupMissingError: It was not created (a KeyError).
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
            GridDestroyedError: The grid was destroyed.
        """
        return self._owner.get(self._key(dims, name))

    def ensure_pg(
        self,
        dims: str | Iterable[str],
        *,
        name: str | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        share: Share | None = None,
        derive: Derive | None = None,
    ) -> ProcessGroup | None:
        """Create a process group on the first call, and return the same one afterwards.

        Takes what `create_pg` takes, and raises what it raises, but for a key that exists.

        Raises:
            GroupOptionsError: The options given, or the groups derived, differ from those of the
                first call.
        """
        return self._owner.ensure(
            self._request(dims, name, backend, timeout, pg_options, group_desc, share, derive)
        )

    def create_pgs(
        self,
        requests: Iterable[str | Iterable[str] | GroupArguments],
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        share: Share | None = None,
    ) -> list[ProcessGroup | None]:
        """Create several process groups in one call, in the order given, all or none.

        Every rank of the grid must call this with the same list; ranks outside may. A rank whose
        list differs from that of the rank that came first learns so before it creates anything.
        If one group fails on a rank, that rank destroys those of the call that it has.

        Args:
            requests: For each group its dims, or a mapping of arguments of `create_pg` by name:
                `["tp", ["dp", "cp"], {"dims": "dp", "name": "gloo", "backend": "gloo"}]`.
            backend: As for `create_pg`, where a request does not say; so are the other two.
            timeout: For each group apart.
            share: Groups of the same call may share too.

        Returns:
            For each request what `create_pg` returns.

        Raises:
            GroupExistsError: A key is there twice, or was created before; nothing was created.
            PlanMismatchError: Another rank's list differs; says where.
            LayoutError, GroupOptionsError, CreationError: As for `create_pg`.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
            ...     tp, dp_cp = grid.create_pgs(["tp", ["dp", "cp"]])
            ...     print(tp.size(), dp_cp.size(), [str(key) for key in grid.pgs])
            2 4 ['tp', 'cp+dp']
        """
        self._owner.check_alive()
        defaults = {"backend": backend, "timeout": timeout, "share": share}
        arguments = [{**defaults, **given} for given in _as_arguments(requests)]
        return self._owner.create_all([self._request(**each) for each in arguments])

    def explain(
        self, dims: str | Iterable[str], *, name: str | None = None, backend: str | None = None
    ) -> Explanation:
        """Say how the process groups over some dims were created, or would be, and why.

        Creates nothing, and asks nobody.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     print(grid.explain("dp"))
            dp: 2 of 4 ranks, fake
              local: each rank creates only the groups that it is a member of
              not split: WORLD is not bound to a device: init_process_group(device_id=...) binds it
              not enumerate: it would work too: every rank walks every group of the world
        """
        return self._owner.explain(self._request(dims, name, backend))

    def device_mesh(self, *dims: str | Iterable[str], device_type: str | None = None) -> DeviceMesh:
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

            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8, rank=5), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     _ = grid.create_pg("tp"), grid.create_pg("dp")
            ...     mesh = grid.device_mesh("dp", "tp")
            ...     print(grid.coords(), tuple(mesh.get_coordinate()), mesh.mesh.tolist())
            {'tp': 1, 'dp': 2} (2, 1) [[0, 1], [2, 3], [4, 5], [6, 7]]
        """
        self._owner.check_alive()
        if device_type is not None and not isinstance(device_type, str):
            raise GroupOptionsError(
                f"device_type must be a name such as 'cuda', got {shown(device_type)}"
            )
        spans = device_mesh.read_dims(self.layout, dims)
        rank = world.rank()
        self.layout.coords(rank)  # refuses a rank outside
        groups = [self.get_pg(names) for names in spans]
        own = [group for group in groups if group is not None]
        device_type = device_type or self._device_type or c10d.device_type(own[0])
        mesh = device_mesh.as_mesh(self.layout, spans, rank, own, device_type)
        self._gave_meshes = True
        return mesh

    def destroy(self) -> None:
        """Destroy the groups that the grid created, the last one first; may be called twice.

        Groups that the grid did not create stay, WORLD included. Afterwards the grid still
        answers questions about ranks, but has no groups and creates none.
        """
        if self._gave_meshes and not self._owner.is_destroyed:
            c10d.forget_meshes()
        self._owner.destroy()

    def abort(self) -> None:
        """End the groups that the grid created, at once: collectives under way fail.

        For a rank that has found that others are gone; NCCL communicators are aborted, groups of
        other backends destroyed without waiting for anybody. The grid is then as destroyed.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8):
            ...     grid = HyperCommGrid([2, 4], ["tp", "dp"])
            ...     tp = grid.create_pg("tp")
            ...     grid.abort()
            ...     print(len(grid.pgs))
            0
        """
        if self._gave_meshes and not self._owner.is_destroyed:
            c10d.forget_meshes()
        self._owner.abort()

    def verify(self, timeout: timedelta | None = None) -> None:
        """Check that all ranks of the grid have planned the same process groups so far, in order.

        Every rank of the grid must call this; each waits for the others. It costs a rank two
        questions to the store, however many groups there are.

        Args:
            timeout: How long to wait; default: the timeout of WORLD.

        Raises:
            PlanMismatchError: Another rank's groups differ; names the first one that does.
            GroupCreationTimeout: A rank did not call this in time; names it.
            GridMismatchError: Another rank means another grid.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
            ...     _ = grid.create_pg("tp")
            ...     grid.verify()  # a fake world has nobody to ask
        """
        check_timeout(timeout)
        self._owner.verify(timeout)

    def __enter__(self) -> Self:
        self._owner.check_alive()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.destroy()

    def _key(self, dims: str | Iterable[str], name: str | None) -> GroupKey:
        self._owner.check_alive()
        _check_name(name)
        return GroupKey(self.layout.order_dims(dims), name)

    def _request(
        self,
        dims: str | Iterable[str],
        name: str | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        share: Share | None = None,
        derive: Derive | None = None,
    ) -> GroupRequest:
        """A call, with what the grid says where the call does not."""
        key = self._key(dims, name)
        backend = self.backend if backend is None else backend
        sharing = self._share if share is None else share
        _check_choice("share", sharing, ("never", "identical"))
        given = GroupOptions(backend, timeout, pg_options, group_desc, self._lazy_init)
        if c10d.is_live():
            _check_world(self.layout, dist.get_world_size(), "any")
        return GroupRequest(key, given, sharing, derive)

    # ---- how it looks -------------------------------------------------------------------------

    def __repr__(self) -> str:
        return "\n".join([self._headline(), *(f"  {line}" for line in self._lines())])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{size}</td><td>{stride}</td></tr>"
            for name, size, stride in zip(
                self.layout.dim_names, self.layout.shape, self.layout.strides, strict=True
            )
        )
        return (
            f"<p><b>{html.escape(self._headline())}</b></p>"
            f"<table><thead><tr><th>dim</th><th>size</th><th>stride</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
            f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in self._lines())}</ul>"
        )

    def _headline(self) -> str:
        return (
            f"HyperCommGrid({self.layout}): ranks {self.rank_offset}..{self.layout.last_rank} of a "
            f"world of {self._world_size}"
        )

    def _lines(self) -> list[str]:
        """Where the calling rank is, and the groups that exist."""
        if self._owner.is_destroyed:
            return ["destroyed"]
        lines = [self._whereabouts()]
        lines += [
            f"group {key}: {len(planned.groups)} of {planned.groups.group_size} ranks"
            + (f", {planned.resolved.backend}" if planned.resolved.backend else "")
            for key, planned in ((key, self._owner.planned[key]) for key in self._owner.created)
        ]
        return lines if self._owner.created else [*lines, "no process groups yet"]

    def _whereabouts(self) -> str:
        try:
            rank = world.rank()
        except HyperCommError:
            return "this rank is not known: torch.distributed is not initialised"
        if rank not in self.layout:
            return f"this is rank {rank}, outside the grid"
        return f"this is rank {rank}, at {format_coords(self.layout.coords(rank))}"


def _check_choice(argument: str, value: str, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise GroupOptionsError(f"{argument} must be one of {list(choices)}, got {value!r}")


def _check_world(layout: RankLayout, world_size: int, cover: str) -> None:
    last = layout.last_rank
    if last >= world_size:
        raise WorldSizeError(
            f"the grid {_factors(layout)} at rank_offset {layout.rank_offset} needs ranks up to "
            f"{last}, but the world has {world_size} (ranks 0..{world_size - 1}); make a size "
            f"smaller, or start at least {last + 1} ranks"
        )
    if cover == "exact" and layout.size != world_size:
        raise WorldSizeError(
            f"cover='exact', but the grid {_factors(layout)} leaves {world_size - layout.size} of "
            f"the world's {world_size} ranks out; change a size so that the sizes multiply to "
            f"{world_size}"
        )


def _is_verified(verify: bool | None) -> bool:
    if verify is not None and not isinstance(verify, bool):
        raise GroupOptionsError(f"verify must be True, False or None, got {verify!r}")
    text = os.environ.get("HYPERCOMM_VERIFY", "0")
    if verify is None and text not in {"0", "1"}:
        raise GroupOptionsError(f"the environment's HYPERCOMM_VERIFY must be 0 or 1, got {text!r}")
    return text == "1" if verify is None else verify


def _warn_of_live(owner: GroupOwner, layout: RankLayout) -> None:
    """Say that a grid is gone which nobody destroyed; its groups stay, who knows who uses them."""
    live = owner.live()
    if live:
        warnings.warn(
            f"a HyperCommGrid ({layout}) was collected while its process groups live: "
            f"{', '.join(map(str, live))}; call its destroy(), or use it in a with block",
            ResourceWarning,
            stacklevel=2,
        )


def _factors(layout: RankLayout) -> str:
    sizes = zip(layout.dim_names, layout.shape, strict=True)
    return " * ".join(f"{name}={size}" for name, size in sizes) + f" = {layout.size} ranks"


def _check_name(name: str | None) -> None:
    if name is not None and (not isinstance(name, str) or not name or not is_utf8(name)):
        raise GroupOptionsError(f"name must be a non-empty string of text, got {shown(name)}")


def _as_arguments(
    requests: Iterable[str | Iterable[str] | GroupArguments],
) -> Iterator[Mapping[str, Any]]:
    """The arguments of `create_pg` that each request of `create_pgs` stands for."""
    for request in as_ordered(requests, "the list in create_pgs(['tp', ['dp', 'cp']])"):
        if not isinstance(request, Mapping):
            yield {"dims": request}
            continue
        known = GroupArguments.__annotations__
        unknown = [name for name in request if name not in known]
        if unknown or "dims" not in request:
            wrong = f"has no argument {unknown[0]!r}" if unknown else "needs 'dims'"
            raise GroupOptionsError(
                f"create_pgs() was given {dict(request)!r}, but create_pg() {wrong}; it takes "
                f"{list(known)}"
            )
        yield request
