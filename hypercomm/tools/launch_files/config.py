"""read_config() and LaunchConfig: the layouts and the problems of a launch file."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from hypercomm.errors import HyperCommError, LayoutError, UnknownDimError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_world_size
from hypercomm.layout.parsing import divisors
from hypercomm.layout.text import aligned, pluralize, short_repr
from hypercomm.layout.views import Views
from hypercomm.tools.launch_files.layouts import CHOICES, framework_layouts
from hypercomm.tools.launch_files.reading import Files, Launch, read_launches
from hypercomm.tools.launch_files.source import Source, is_launch_file, printable
from hypercomm.tools.launch_files.tables import (
    Module,
    frameworks,
    holds,
    is_key,
    rules_for,
    similar,
)

if TYPE_CHECKING:
    from hypercomm.grid.grid_set import GridSet


@attrs.frozen(repr=False)
class LaunchConfig:
    """The layouts that a launch file asks for, as `read_config` returns them. `str()` is a table.

    Attributes:
        framework: The name of the framework. If the file starts several programs, all names.
        world_size: The number of ranks, or None if unknown.
        gpus_per_node: The number of ranks on each host, or None if unknown.
        views: The layout of each module, by names such as "training", "actor" and "rollout". Other
            factorisations of the same ranks, such as "expert", are its views. If a script starts
            several programs with different layouts, the names have lines, as in "training@12", and
            "training@12#2" for the second program of a loop.
        sources: The setting that each size was read from, by names such as "training.tp" and
            "world.nodes".
        problems: The problems, as sentences with file and line if known.

    Example:
        >>> config = read_config("torchrun --nproc-per-node 8 pretrain_gpt.py "
        ...     "--tensor-model-parallel-size 2 --expert-model-parallel-size 2")
        >>> for name, layout in config.layouts.items():
        ...     print(name, layout)
        training tp=2,cp=1,dp=4,pp=1
        training:expert expt_tp=2,ep=2,expt_dp=2,pp=1
        >>> config.framework, config.world_size, str(config.source("ep"))
        ('Megatron-LM', 8, 'line 1 --expert-model-parallel-size 2')
    """

    framework: str
    world_size: int | None
    gpus_per_node: int | None
    views: Mapping[str, Views]
    sources: Mapping[str, Source]
    problems: tuple[str, ...]

    @property
    def layouts(self) -> dict[str, RankLayout]:
        """All layouts by name, such as "training", and "training:expert" for its view "expert"."""
        found: dict[str, RankLayout] = {}
        for module, views in self.views.items():
            found[module] = views.base
            found |= {f"{module}:{name}": view.layout for name, view in views.items()}
        return found

    def source(self, size: str) -> Source:
        """Return the setting of the file that a size was read from.

        Args:
            size: The name, such as "rollout.tp". "tp" selects the first module that has this size.

        Raises:
            UnknownDimError: No module has such a size.
        """
        for name, source in self.sources.items():
            if size in (name, name.rpartition(".")[2]):
                return source
        raise UnknownDimError(
            f"there is no size {short_repr(size)}; the sizes are {list(self.sources)}"
        )

    def grids(self, *modules: str, **arguments: Any) -> GridSet:
        r"""Return a grid for each module, with its views. No process group is created.

        Args:
            modules: The names of the modules. Default: all.
            arguments: Further arguments of `GridSet`.

        Raises:
            LayoutError: The layout of a module cannot be read from the file. The message lists the
                problems.
            WorldSizeError: A module has more ranks than the world.

        Example:
            >>> config = read_config("parallelism:\n  tensor_parallel_degree: 2", world_size=8)
            >>> str(config.grids()["training"].view("dense").layout)
            'tp=2,fsdp=4,dp_replicate=1,pp=1'
        """
        from hypercomm.grid.grid_set import GridSet

        wanted = modules or tuple(self.views)
        if missing := [name for name in wanted or ["training"] if name not in self.views]:
            raise LayoutError(
                f"no layout was found for module {missing[0]!r}: "
                f"{'; '.join(self.problems) or f'the modules are {list(self.views)}'}"
            )
        layouts = {name: self.views[name].base for name in wanted}
        grids = GridSet(layouts, **{"world_size": self.world_size, **arguments})
        for module in wanted:
            for name, view in self.views[module].items():
                grids[module].register_view(name, view.layout.sizes, shared_dims=view.shared_dims)
        return grids

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a dict for JSON."""
        return {
            "framework": self.framework,
            "world_size": self.world_size,
            "layouts": {name: str(layout) for name, layout in self.layouts.items()},
            "sources": {name: attrs.asdict(source) for name, source in self.sources.items()},
            "problems": list(self.problems),
        }

    @property
    def _headline(self) -> str:
        size = self.world_size
        ranks = "the number of ranks is not given" if size is None else pluralize(size, "rank")
        return f"{self.framework}; {ranks}"

    def __str__(self) -> str:
        """Return the framework, the sizes with their sources, and the problems.

        Example:
            >>> print(read_config("vllm serve model --tensor-parallel-size 4"))
            vLLM; 4 ranks
            inference.tp  4  line 1 --tensor-parallel-size 4
            inference.pp  1  default
            inference.dp  1  default
        """
        rows = [(name, str(one.value), str(one)) for name, one in self.sources.items()]
        problems = [f"problem: {text}" for text in self.problems]
        return "\n".join([self._headline, *(aligned(rows) if rows else []), *problems])

    def __repr__(self) -> str:
        """Return the framework and the layouts.

        >>> read_config("vllm serve model --tensor-parallel-size 4")
        <LaunchConfig: vLLM; 4 ranks; inference tp=4,pp=1,dp=1>
        """
        layouts = [f"{name} {layout}" for name, layout in self.layouts.items()]
        count = len(self.problems)
        problems = [pluralize(count, "problem")] if count else []
        return f"<LaunchConfig: {'; '.join([self._headline, *layouts, *problems])}>"


def read_config(
    path_or_text: str | os.PathLike[str],
    world_size: int | None = None,
    *,
    variables: Mapping[str, str] | None = None,
    include: Iterable[str | os.PathLike[str]] = (),
) -> LaunchConfig:
    """Read the layouts of a launch file: a script, a configuration or a command line.

    The file is not run, and nothing in it is imported. Variables that a script does not set are
    taken from the environment, as if the script ran.

    Args:
        path_or_text: The path or the text of a shell script, or of a YAML, TOML or JSON file.
        world_size: The number of ranks. Default: from the file.
        variables: The values of variables of a script, and of its arguments by their numbers, such
            as {"1": "70b"}. The script cannot change them.
        include: Files and folders outside the folder of the file that may be read if the file names
            them.

    Returns:
        The framework, the layouts, the setting that each size was read from, and the problems.

    Raises:
        LayoutError: The file cannot be read, is binary or larger than 256 KiB, names more than 64
            files, or belongs to an unknown framework.
        MissingPackageError: Scripts need tree-sitter-bash, YAML and JSON need pyyaml, and TOML
            needs tomli before Python 3.11.

    Example:
        >>> config = read_config("vllm serve model --tensor-parallel-size 4 --data-parallel-size 2")
        >>> str(config.layouts["inference"]), config.world_size
        ('tp=4,pp=1,dp=2', 8)
    """
    if world_size is not None:
        as_world_size(world_size, "world_size")
    if not isinstance(path_or_text, (str, os.PathLike)):
        kind = type(path_or_text).__name__
        raise LayoutError(f"expected a path or a text, got a value of type {kind}")
    is_text = isinstance(path_or_text, str) and not is_launch_file(path_or_text)
    path = Path() if is_text else Path(path_or_text)
    given = {name: str(value) for name, value in (variables or {}).items()}
    files = Files(path, include, given)
    content = str(path_or_text).encode(errors="replace")
    text = files.decode(content, "the text") if is_text else files.load(path)
    launches, settings = read_launches(text, files)
    if not launches:
        raise _unknown(path.name, settings)
    configs = _distinct([_Reading(launch).config(world_size) for launch in launches])
    if len(configs) == 1:
        return configs[0][1]
    return _joined(configs)


def _unknown(file: str, settings: Sequence[Source]) -> LayoutError:
    """Return the error about a file whose framework is unknown."""
    names = ", ".join(sorted({one.name for one in frameworks()[:-1]}, key=str.lower))
    keys = [key for one in frameworks() for key in one.known_keys()]
    hint = ""
    for one in settings:
        if one.path and (near := similar(one.path[-1], keys)):
            flag = f"--{near.replace('_', '-')}"
            hint = f"; did you mean {flag if one.key.startswith('--') else near}?"
    return LayoutError(
        f"{printable(file) or 'the text'} belongs to an unknown framework: it starts no program "
        f"and has no key of {names}; give the sizes, as in tp=8,dp=4{hint}"
    )


def _distinct(configs: Sequence[tuple[int, LaunchConfig]]) -> list[tuple[int, LaunchConfig]]:
    """Return the configurations of all programs, one for those that are equal."""
    found: dict[Any, tuple[int, LaunchConfig]] = {}
    for line, config in configs:
        layouts = tuple((name, str(layout)) for name, layout in config.layouts.items())
        texts = tuple(text.partition(" ")[2] for text in config.problems)
        found.setdefault((config.framework, layouts, config.world_size, texts), (line, config))
    return list(found.values())


def _joined(configs: Sequence[tuple[int, LaunchConfig]]) -> LaunchConfig:
    """Return one configuration of several programs. The names of the modules have their lines."""
    views: dict[str, Views] = {}
    sources: dict[str, Source] = {}
    problems: list[str] = []
    lines: list[int] = []
    for line, config in configs:
        lines.append(line)
        place = f"@{line}" if lines.count(line) == 1 else f"@{line}#{lines.count(line)}"
        views |= {f"{name}{place}": one for name, one in config.views.items()}
        for name, source in config.sources.items():
            module, _, size = name.rpartition(".")
            sources[f"{module}{place}.{size}"] = source
        problems += config.problems
    sizes = {config.world_size for _, config in configs}
    per_node = {config.gpus_per_node for _, config in configs}
    names = dict.fromkeys(config.framework for _, config in configs)
    return LaunchConfig(
        " and ".join(names),
        sizes.pop() if len(sizes) == 1 else None,
        per_node.pop() if len(per_node) == 1 else None,
        views,
        sources,
        tuple(dict.fromkeys(problems)),
    )


# ---- from settings to layouts -------------------------------------------------------------------


@attrs.define
class _Reading:
    """Converts the settings of a program to a LaunchConfig, and collects sources and problems.

    Attributes:
        launch: The program.
        sources: The setting that each size was read from.
        problems: The problems so far.
        unknown: The modules with a size whose value is not known.
    """

    launch: Launch
    sources: dict[str, Source] = attrs.field(factory=dict)
    problems: list[str] = attrs.field(factory=list)
    unknown: set[str] = attrs.field(factory=set)

    def config(self, asked: int | None) -> tuple[int, LaunchConfig]:
        """Return the line of the program, and the layouts of all its modules."""
        framework = self.launch.framework
        complaints = [(one, framework.complaint(one)) for one in self.launch.settings]
        self.problems += self.launch.problems
        self.problems += [f"{one} {text}" for one, text in complaints if text]
        modules = self._modules()
        world, per_node = self._world(modules)
        ranks = {one.name: self._ranks_of(one, per_node) for one in modules}
        apart = sum(ranks[one.name] or 0 for one in modules if one.is_apart)
        total = asked or (world and framework.adds_apart and world + apart) or world
        shared = total - apart if total and 0 < apart < total else total
        views = self._layouts(modules, ranks, shared, total)
        if not views and not self.problems:
            self.problems.append(
                f"no size of {framework.name} was found; give the file that sets them, or sizes, "
                f"as in tp=8,dp=4"
            )
        needed = self._total(modules, views)
        if total is not None and needed > total > 0 and any(one.is_apart for one in modules):
            self.problems.append(f"the modules need {needed} ranks; there are {total}")
        if total is None and views and "world" not in self.unknown:
            total = needed
        problems = tuple(dict.fromkeys(self.problems))
        config = LaunchConfig(framework.name, total, per_node, views, self.sources, problems)
        return self.launch.line, config

    def _layouts(
        self,
        modules: Sequence[Module],
        ranks: Mapping[str, int | None],
        shared: int | None,
        total: int | None,
    ) -> dict[str, Views]:
        """Return the layouts of the modules whose sizes are known.

        Args:
            modules: The modules.
            ranks: The numbers of ranks that modules have of their own.
            shared: The number of ranks of all other modules.
            total: The number of ranks of the file.
        """
        views: dict[str, Views] = {}
        sizes: dict[str, dict[str, Any]] = {}
        for module in modules:
            own = self._sizes(module.name, module.sizes)
            if not own and not module.always and not module.problem:
                continue
            if module.zero_is_one:
                own = {name: size or 1 for name, size in own.items()}
            taken = sizes.get(module.inherits, {})
            taken = {name: size for name, size in taken.items() if name not in module.own}
            given = sizes[module.name] = {**module.defaults, **taken, **own}
            if module.problem:
                self.problems.append(f"{module.name}: {module.problem}")
            elif not self.unknown & {module.name, "world"}:
                there = ranks[module.name] or shared
                before = dict(given)
                try:
                    views[module.name] = self._views(module, given, there, total)
                except HyperCommError as error:
                    text = re.sub("; [^;]* would fit", "", str(error))  # fits one layout only
                    hint = self._would_fit(module, before, there, total)
                    self.problems.append(f"{module.name}: {printable(text)}{hint}")
        return views

    def _would_fit(
        self, module: Module, given: Mapping[str, Any], ranks: int | None, total: int | None
    ) -> str:
        """Return a clause with the nearest value of each size that fits all layouts, or ""."""
        sizes = {name: size for name, size in given.items() if name not in CHOICES and size != 1}
        if module.layout == "megatron" and "ep" in sizes:
            sizes.setdefault("expt_tp", given.get("tp", 1))
        found = []
        for name, before in sizes.items():
            for size in sorted(divisors(ranks or 1), key=lambda size: abs(size - before)):
                trial = _Reading(self.launch)
                with contextlib.suppress(HyperCommError):
                    trial._views(module, {**given, name: size}, ranks, total)
                    if {*trial.problems} <= {*self.problems}:
                        found.append(f"{name}={size}")
                        break
        return f"; {' or '.join(found)} would fit" if found and ranks else ""

    def _modules(self) -> list[Module]:
        """Return the first row of each module whose condition holds."""
        found: dict[str, Module] = {}
        for module in self.launch.framework.module:
            if module.name not in found and holds(module.when, self.launch.settings):
                found[module.name] = module
        return list(found.values())

    def _views(
        self, module: Module, given: dict[str, Any], ranks: int | None, total: int | None
    ) -> Views:
        """Return the layouts of a module, and add the sources of sizes that are not given."""
        kind = module.layout
        if module.product:
            ranks = math.prod(given.get(size, 1) for size in module.product)
            if kind == "megatron":
                given = {name: size for name, size in given.items() if name != "dp"}
            if total is not None and ranks > total:
                self.problems.append(
                    f"{module.name}: its sizes need {ranks} ranks; there are {total}"
                )
        self._apply_rules(module.name, kind, given)
        views = framework_layouts(kind, given, ranks)
        for layout in (views.base, *(view.layout for view in views.values())):
            for dim, size in layout.sizes.items():
                default = f"as {module.inherits}" if module.inherits else "default"
                key = default if size == 1 else "follows from the other sizes"
                if size == ranks and dim in ("dp", "dp_shard"):
                    key = "all ranks"
                self.sources.setdefault(f"{module.name}.{dim}", Source(size, key))
        return views

    def _apply_rules(self, label: str, kind: str, given: dict[str, Any]) -> None:
        """Remove the sizes that a layout ignores, and add problems about them."""
        for rule in rules_for(kind):
            if rule.applies(given):
                numbers = {name: given.get(name, 1) for name in (*rule.when, *rule.drops)}
                if rule.says:
                    self.problems.append(f"{label}: {rule.says.format_map(numbers)}")
                for size in rule.drops:
                    given.pop(size, None)

    @staticmethod
    def _total(modules: Sequence[Module], views: Mapping[str, Views]) -> int:
        """Return the number of ranks of modules that have ranks of their own."""
        sizes = {one.name: views[one.name].base.size for one in modules if one.name in views}
        apart = sum(sizes.get(one.name, 0) for one in modules if one.is_apart)
        shared = max((sizes.get(one.name, 0) for one in modules if not one.is_apart), default=0)
        return shared + apart

    # ---- numbers of ranks ---------------------------------------------------------------------

    def _world(self, modules: Sequence[Module]) -> tuple[int | None, int | None]:
        """Return the number of ranks of the file, and the number of ranks per node, if known."""
        launcher = frameworks()[-1]
        keys = {
            role: (*self.launch.framework.world.get(role, ()), *launcher.world.get(role, ()))
            for role in launcher.world
        }
        own = self._sizes("world", keys)
        sources = dict(self.sources)
        job = self._sizes("world", keys, self.launch.job)
        for role, size in own.items():
            if job.get(role, size) != size and role in ("nodes", "gpus_per_node"):
                there = self.sources[f"world.{role}"]
                one = sources[f"world.{role}"]
                self.problems.append(f"{one} contradicts {there}; give --world-size")
        self.sources |= sources
        given = {name: size for name, size in {**job, **own}.items() if size > 0}
        is_default = not all(module.product for module in modules)
        if is_default and "ranks" not in given and not (job and "gpus_per_node" not in own):
            given = {**self.launch.framework.world_defaults, **given}
        per_node = given.get("gpus_per_node") or given.get("gpus")
        if per_node is None and given.get("tasks_per_node", 1) > 1:  # one task may start all ranks
            per_node = given["tasks_per_node"]
        total = given.get("ranks")
        if per_node is not None and ("nodes" in given or total is None):
            product = per_node * given.get("nodes", 1)
            if total is not None and total != product:
                self.problems.append(
                    f"{self.sources['world.ranks']} contradicts {product} ranks = "
                    f"{given.get('nodes', 1)} nodes of {per_node}; give --world-size"
                )
            total = total or product
        total = total or given.get("tasks")
        return (as_world_size(total, "the number of ranks") if total else None), per_node

    def _ranks_of(self, module: Module, per_node: int | None) -> int | None:
        """Return the number of ranks that a module has of its own, or None."""
        given = self._sizes(module.name, module.world)
        if not given and not module.world_defaults:
            return None
        given = {**module.world_defaults, **given}
        if "ranks" in given:
            return given["ranks"] or None
        each = given.get("gpus_per_node", per_node)
        return each * given.get("nodes", 1) * given.get("replicas", 1) if each else None

    # ---- values -------------------------------------------------------------------------------

    def _sizes(
        self,
        label: str,
        keys: Mapping[str, Sequence[str]],
        settings: Sequence[Source] | None = None,
    ) -> dict[str, Any]:
        """Return the sizes or choices that settings set. The last of several values counts."""
        given: dict[str, Any] = {}
        settings = self.launch.settings if settings is None else settings
        for size, names in keys.items():
            for key in names:  # the keys are in the order of their precedence
                found = [one for one in settings if is_key(one.path, key)]
                if found:
                    break
            if not found:
                continue
            last = found[-1]
            if len({one.value for one in found}) > 1:
                others = ", ".join(f"{one.value} in line {one.line}" for one in found[-4:-1])
                self.problems.append(f"{last} replaces another value of {size} ({others})")
            value = self._value(label, size, last)
            if value is not None:
                given[size] = value
                self.sources[f"{label}.{size}"] = last.with_value(value)
        return given

    def _value(self, label: str, size: str, one: Source) -> int | None:
        """Return the value of a size or choice, or None if the value cannot be used.

        A value that is not a number adds a problem, unless it is a word such as "auto" or "none".
        """
        text = str(one.value).strip().lower()
        if one.others:
            values = " or ".join(one.others)
            names = self.launch.tested
            hint = f", as in --set {names[0]}=VALUE" if names else ""
            self.problems.append(f"{one} differs between branches: {values}; set one{hint}")
            self.unknown.add(label)
            return None
        if size in CHOICES and size != "stage":
            return None if text in ("false", "0", "no", "off", "none", "null") else 1
        number = text.rpartition(":")[2] if size == "gpus" else text  # such as gpu:8
        if re.fullmatch(r"-?[0-9]{1,9}", number):
            return int(number)
        if text in ("", "null", "none", "~", "auto", "gpu") or (
            size == "stage" and "$" not in text
        ):
            return None
        names = re.findall(r"\$[{(]*([A-Za-z_]\w*)|\$\{?(\d+)", str(one.value))
        name = next((name or number for name, number in names), "")
        why = f"is not a number: {short_repr(one.value)}"
        if re.search(r"\$\((\.{3}|hook)\)", text) or ("$((" in text and not name):
            why = "is computed by a command, which is not run; write its value"
        elif name.isdecimal():
            why = (
                f"is argument {name} of the script, which is not known; give it, as in "
                f"--set {name}=8"
            )
        elif name:
            why = f"needs {name}, which is not set; set it, as in --set {name}=8"
        self.problems.append(f"{one} {why}")
        self.unknown.add(label)
        return None
