"""read_config() and LaunchConfig: the layouts and the problems of a launch file."""

from __future__ import annotations

import io
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from hypercomm.compat import launch_options as known
from hypercomm.compat.layouts import ENGINES, MESH, framework_layouts
from hypercomm.errors import HyperCommError, LayoutError, UnknownDimError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_world_size
from hypercomm.layout.text import aligned, pluralize, short_repr
from hypercomm.layout.views import Views
from hypercomm.tools.launch_files.reading import Source, read_settings, resolved

if TYPE_CHECKING:
    from hypercomm.grid.grid_set import GridSet

_MOST_BASES = 8
"""The longest chain of files that name each other in `defaults`."""

_GIVE = "give the path of a launch file, or sizes, as in tp=8,dp=4"

_LARGEST = 2**18
"""The most bytes of a launch file."""


@attrs.frozen(repr=False)
class LaunchConfig:
    """The layouts that a launch file asks for, as `read_config` returns them. `str()` is a table.

    Attributes:
        framework: The name of the framework.
        world_size: The number of ranks, or None if unknown.
        gpus_per_node: The number of ranks on each host, or None if unknown.
        views: The layout of each module, by names such as "training", "actor" and "rollout". Other
            factorisations of the same ranks, such as "expert", are its views.
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
    path_or_text: str | os.PathLike[str], world_size: int | None = None
) -> LaunchConfig:
    """Read the layouts of a launch file: a script, a configuration or a command line.

    The file is not run, and nothing in it is imported. Variables that a script does not set are
    taken from the environment, as if the script ran.

    Args:
        path_or_text: The path or the text of a shell script, or of a YAML, TOML or JSON file.
        world_size: The number of ranks. Default: from the file.

    Returns:
        The framework, the layouts, the setting that each size was read from, and the problems.

    Raises:
        LayoutError: The file cannot be read, is binary or larger than 256 KiB, or belongs to an
            unknown framework.
        MissingPackageError: YAML and JSON need pyyaml, and TOML needs tomli before Python 3.11.

    Example:
        >>> config = read_config("vllm serve model --tensor-parallel-size 4 --data-parallel-size 2")
        >>> str(config.layouts["inference"]), config.world_size
        ('tp=4,pp=1,dp=2', 8)
    """
    if world_size is not None:
        as_world_size(world_size, "world_size")
    text, path = _load(path_or_text)
    file = path.name
    texts: list[str] = []
    settings = _settings(text, path, texts)
    framework = _framework_of(texts)
    if framework is None:
        names = ", ".join(dict.fromkeys(one.name for one in known.FRAMEWORKS))
        near = next(filter(None, map(_similar_key, settings)), "")
        hint = f"; did you mean {near}?" if near else ""
        raise LayoutError(
            f"{file or 'the text'} belongs to an unknown framework: it has no flag, key or command "
            f"of {names}, such as --tensor-model-parallel-size; give the sizes, as in tp=8,dp=4"
            f"{hint}"
        )
    reading = _Reading(framework)
    for found in re.finditer(r"(?m)^[ \t]*eval[ \t]+\"?(?:\$\{?(\w+))?", text):
        if not found[1] or not re.search(rf"\b{found[1]}\+?=", text):  # assigned text is read
            here = Source("", "eval", "...", file, 1 + text.count("\n", 0, found.start()))
            reading.problem(here, "runs a text that is not read")
            break
    return reading.config(settings, world_size)


def is_launch_file(text: str) -> bool:
    """Return whether an argument is the path of a file or folder, rather than sizes.

    A folder whose name could be the name of a dim counts as sizes.

    Example:
        >>> is_launch_file("tp=2,dp=4"), is_launch_file("scripts/run.sh")
        (False, True)
    """
    is_name = re.fullmatch(r"[^=,\s]*(/[^=,\s]*|\.[A-Za-z]+)", text)
    if is_name or os.path.isfile(text):  # noqa: PTH113 - Path raises for a long text
        return True
    return os.path.isdir(text) and not text.isidentifier()  # noqa: PTH112


def _load(given: str | os.PathLike[str]) -> tuple[str, Path]:
    """Return the text and the path of a file. If the text itself is given, the path is empty."""
    if not isinstance(given, (str, os.PathLike)):
        raise LayoutError(f"expected a path or a text, got a value of type {type(given).__name__}")
    is_text = isinstance(given, str) and not is_launch_file(given)
    try:
        with io.BytesIO(str(given).encode()) if is_text else Path(given).open("rb") as file:
            content = file.read(_LARGEST + 1)
        text = content.decode("utf-8-sig")
    except IsADirectoryError as error:
        raise LayoutError(f"{short_repr(str(given))} is a folder; {_GIVE}") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise LayoutError(
            f"{short_repr(str(given))} cannot be read as text: {why}; {_GIVE}"
        ) from error
    if len(content) > _LARGEST or "\0" in text:
        raise LayoutError(
            f"{short_repr(str(given))} is not a launch file: it is binary, or has more than "
            f"{_LARGEST:,} bytes"
        )
    return text, Path() if is_text else Path(given)


def _framework_of(texts: list[str]) -> known.Framework | None:
    """Return the framework of a file and of the files in its `defaults`, or None if unknown."""
    code = [re.sub(r"(?m)(^|[ \t])#(?!SBATCH|!)[^\n]*", "", text) for text in texts]
    for framework in known.FRAMEWORKS:
        if any(re.search(framework.mark, text) for text in code):
            return framework
    return None


def _settings(text: str, path: Path, texts: list[str], depth: int = 0) -> list[Source]:
    """Return the settings of a file, after the settings of the files in its `defaults`.

    Args:
        text: The text of the file.
        path: The path of the file.
        texts: Receives the texts of all files, this file first.
        depth: The number of files that lead to this file.
    """
    texts.append(text)
    settings = read_settings(text, path.name, os.environ)
    for one in [one for one in settings if one.path == ("defaults",)]:
        base = path.parent / one.value
        if path.name and base.is_file() and depth < _MOST_BASES:
            own = {one.path for one in settings}
            before = _settings(_load(base)[0], base, texts, depth + 1)
            settings = [one for one in before if one.path not in own] + settings
            settings.remove(one)
    return resolved(settings, {}, path.name) if depth == 0 else settings


def _similar_key(one: Source) -> str:
    """Return the key of a size that a key resembles, as the file would write it, or "".

    >>> _similar_key(Source(8, "--data-paralel-size", path=("data_paralel_size",)))
    '--data-parallel-size'
    """
    name = known.similar_size(one.path) if one.path else ""
    if not name:
        return ""
    begin = one.key[: len(one.key) - len(one.path[-1])]
    return begin + (name.replace("_", "-") if "-" in one.key[len(begin) :] else name)


# ---- from settings to layouts -------------------------------------------------------------------


@attrs.define
class _Module:
    """The settings of one module.

    Attributes:
        sizes: The settings of each size, in the order of the file.
        words: The parts of all keys.
    """

    sizes: dict[str, list[Source]] = attrs.field(factory=lambda: defaultdict(list))
    words: set[str] = attrs.field(factory=set)


@attrs.define
class _Reading:
    """Converts the settings of a file to a LaunchConfig, and collects sources and problems.

    Attributes:
        framework: The framework of the file.
        sources: The setting that each size was read from.
        problems: The problems so far.
        unknown: The modules with a size whose value is not a number.
    """

    framework: known.Framework
    sources: dict[str, Source] = attrs.field(factory=dict)
    problems: list[str] = attrs.field(factory=list)
    unknown: set[str] = attrs.field(factory=set)

    def problem(self, one: Source, text: str) -> None:
        """Add a problem with a setting."""
        self.problems.append(f"{one} {text}")

    def config(self, settings: list[Source], asked: int | None) -> LaunchConfig:
        """Return the layouts of all modules."""
        modules = self._modules(settings)
        world, per_node = self._world("world", modules[""])
        total = asked or world
        trained = total
        if total and self._has_own_engines(settings):
            trained = self._without_engines(total, per_node, modules) or total
        is_engine = self.framework.kind in ENGINES
        views: dict[str, Views] = {}
        sizes: dict[str, dict[str, Any]] = {}
        for name, module in modules.items():
            label = name or ("inference" if is_engine else "training")
            if not known.PARALLEL & {*module.sizes} and label not in self.framework.modules:
                continue
            own = self._world(label, module, per_node)[0] if name else None
            parent = self.framework.parents.get(label, "")
            own_sizes = self._sizes(label, module, is_world=False)
            taken = {n: size for n, size in sizes.get(parent, {}).items() if n not in known.OWN}
            given = {**self.framework.defaults, **taken, **own_sizes}
            sizes[label] = given
            kind = self._kind(module)
            try:
                if label not in self.unknown:
                    rules = known.apply_rules(kind, given)
                    self.problems += [f"{label}: {text}" for text in rules]
                    views[label] = framework_layouts(kind, given, own or trained)
                    self._add_defaults(label, views[label], f"as {parent}" if parent else "default")
            except HyperCommError as error:
                self.problems.append(f"{label}: {error}")
        if total is None and is_engine and views:
            total = max(one.base.size for one in views.values())
        problems = tuple(dict.fromkeys(self.problems))
        return LaunchConfig(self.framework.name, total, per_node, views, self.sources, problems)

    @staticmethod
    def _has_own_engines(settings: list[Source]) -> bool:
        """Return whether inference engines run on GPUs of their own, which are not trained on."""
        return any(
            one.path[-2:] == ("colocated", "enabled") and one.value.lower() == "false"
            for one in settings
        )

    def _without_engines(
        self, total: int, per_node: int | None, modules: Mapping[str, _Module]
    ) -> int:
        """Return the number of ranks that are trained on."""
        for name, module in modules.items():
            if name and known.SERVING.search(name):
                total -= self._world(name, module, per_node)[0] or 0
        return total

    def _add_defaults(self, label: str, views: Views, default: str) -> None:
        for layout in (views.base, *(view.layout for view in views.values())):
            for dim, size in layout.sizes.items():
                key = default if size == 1 else "follows from the other sizes"
                self.sources.setdefault(f"{label}.{dim}", Source(size, key))

    def _modules(self, settings: list[Source]) -> dict[str, _Module]:
        """Return the settings by module. Keys without a module belong to ""."""
        found: dict[str, _Module] = defaultdict(_Module)
        off = [
            one.path[:-1]
            for one in settings
            if one.path[-1:] == ("enabled",) and one.value.lower() == "false"
            if one.path[-2:-1] not in ((), ("colocated",))
        ]
        live = [one for one in settings if not any(one.path[: len(key)] == key for key in off)]
        split = [(one, *known.module_and_size(one.path)) for one in live]
        written = {size for one, _, size in split if not one.is_variable}
        for one, module, size in split:
            name = "" if module == "training" else module  # the label of keys without a module
            if not size and not one.is_variable and (near := _similar_key(one)):
                self.problem(one, f"is an unknown option; did you mean {near}?")
            found[name].words |= {*one.path[:-1], name}
            if one.path[-2:] == ("rollout", "name"):
                found[name].words.add(one.value)
            others = {size} if size in known.WORLD else known.PARALLEL
            if size and not (one.is_variable and others & written):
                found[name].sizes[size].append(one)
            if one.path[:1] == ("defaults",) and one.value != "_self_":
                self.problem(one, "is not read; sizes that only this file sets count as 1")
        for name in ("", *self.framework.modules):
            found["" if name in ("training", "inference") else name]
        return dict(sorted(found.items(), key=lambda pair: pair[0] in self.framework.parents))

    def _kind(self, module: _Module) -> str:
        """Return the kind of a module, which selects its rules and its layouts."""
        kind = self.framework.kind
        words = " ".join(module.words - {"actor_rollout_ref"})
        if kind in ENGINES or known.SERVING.search(words):
            return "sglang" if "sglang" in words else self.framework.serving
        if MESH in module.sizes:
            return MESH
        return "megatron" if "megatron" in words else kind

    def _sizes(self, label: str, module: _Module, is_world: bool) -> dict[str, Any]:
        """Return the sizes of a module, or of its world. The last of several values counts."""
        given: dict[str, Any] = {}
        own = {
            size: all_ for size, all_ in module.sizes.items() if (size in known.WORLD) is is_world
        }
        for size, settings in own.items():
            last = settings[-1]
            if len({one.value for one in settings}) > 1:
                others = ", ".join(f"{one.value} in line {one.line}" for one in settings[-4:-1])
                self.problem(last, f"replaces another value of {size} ({others})")
            value = self._value(label, size, last)
            if value is not None:
                given[size] = value
                self.sources[f"{label}.{size}"] = attrs.evolve(last, value=value)
        return given

    def _value(self, label: str, size: str, one: Source) -> int | str | None:
        """Return the value of a size or choice, or None if the value cannot be used.

        A value that is not a number adds a problem, unless it is a word such as "auto" or "none".
        """
        text = one.value.strip().lower()
        if size in known.SWITCHES:
            return 1 if text in ("true", "1", "yes", "on") else None
        if size in known.TEXTS:
            return text if re.fullmatch(known.TEXTS[size], text) else None
        number = text.rpartition(":")[2] if size == "gpus" else text  # such as gpu:8
        if re.fullmatch(r"-?[0-9]{1,9}", number):
            return int(number)
        if text in ("", "null", "none", "~", "auto") or (size in known.WEAK and "$" not in text):
            return None
        names = re.findall(r"\$[{(]?([A-Z]\w*|(?<!\()[A-Za-z_]\w*|(?<!\()\d+)", one.value)
        why = f"is not a number: {short_repr(one.value)}"
        if names and names[0].isdecimal():
            why = f"is argument {names[0]} of the script, which is not known; write its value"
        elif names:
            why = f"needs {names[0]}, which is not set; set it, as in {names[0]}=8 hypercomm plan"
        elif "$(" in text or "`" in text:
            why = "is computed by a command, which is not run; write its value"
        self.problem(one, why)
        self.unknown.add(label)
        return None

    def _world(
        self, label: str, module: _Module, default: int | None = None
    ) -> tuple[int | None, int | None]:
        """Return the number of ranks, and the number of ranks per node. None means unknown.

        Args:
            label: The name of the module, or "world".
            module: The settings of the module.
            default: The number of ranks per node of a module that only gives its nodes.
        """
        sizes = self._sizes(label, module, is_world=True)
        given = {name: size for name, size in sizes.items() if size > 0}
        per_node = given.get("gpus_per_node") or given.get("gpus") or given.get("tasks_per_node")
        if "nodes" in given:
            per_node = per_node or default
        nodes = given.get("nodes") or given.get("slurm_nodes") or 1
        total = given.get("ranks") or (per_node and per_node * nodes) or given.get("tasks")
        if total and label not in self.unknown:
            return as_world_size(total, "the number of ranks"), per_node
        return None, per_node
