"""Lets the commands plan, place, draw and diff accept launch files in place of sizes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hypercomm.cli.options import format_views
from hypercomm.cli.printing import print_json, write
from hypercomm.errors import LayoutError, UnknownDimError
from hypercomm.tools.launch_files.source import is_launch_file, printable

if TYPE_CHECKING:
    from hypercomm.tools.launch_files.config import LaunchConfig

_SET = click.Option(
    ["--set", "variables"],
    multiple=True,
    metavar="NAME=VALUE",
    help="A variable of a launch script, or an argument by its number, as in --set 1=70b.",
)
_INCLUDE = click.Option(
    ["--include"],
    multiple=True,
    metavar="PATH",
    help="A file or folder, outside the folder of the launch file, that may be read.",
)
_HELP = (
    "Instead of sizes, a launch file of Megatron, torchtitan, verl, DeepSpeed, vLLM or others can "
    "be given. The problems of the file are shown. If there are any, the exit code is 1."
)


def with_files(*arguments: str) -> Callable[[click.Command], click.Command]:
    """Return a decorator that lets a command accept launch files instead of sizes.

    Args:
        arguments: The names of the command's arguments that are sizes.
    """

    def decorate(command: click.Command) -> click.Command:
        run = command.callback
        assert run is not None  # noqa: S101 - every decorated command has a callback

        @functools.wraps(run)
        def read(**given: Any) -> int:
            variables = _variables(given.pop("variables"))
            include = given.pop("include")
            files = [name for name in arguments if given[name] and is_launch_file(given[name])]
            if not files:
                return run(**given) or 0
            # A command without a file does not load the reader of files.
            from hypercomm.tools.launch_files.config import read_config

            world_size = given["world_size"]
            configs = {
                name: read_config(
                    Path(given[name]), world_size, variables=variables, include=include
                )
                for name in files
            }
            has_problems = int(any(config.problems for config in configs.values()))
            if given.get("as_json"):
                found = [config.to_dict() for config in configs.values()]
                print_json(found if len(found) > 1 else found[0])
                return has_problems
            for name, config in configs.items():
                write(f"{printable(given[name])}: {config}\n")
            first = configs[files[0]]
            shared = [
                module
                for module in first.views
                if all(module in config.views for config in configs.values())
            ]
            if not shared and all(config.views for config in configs.values()):
                write("\nno module is in both files\n")
            modules = shared if not given.get("output") else shared[:1]
            unknown = 0  # the modules without the dims that are given
            for module in modules:
                write(f"\n{module}\n")
                try:
                    run(**_call(given, configs, module))
                except UnknownDimError as error:
                    unknown += 1
                    if unknown == len(modules):
                        raise
                    write(f"{error}\n")
            return has_problems

        command.callback = read
        command.params += [_SET, _INCLUDE]
        command.help = f"{inspect.cleandoc(command.help or '')}\n\n{_HELP}"
        return command

    return decorate


def _variables(texts: tuple[str, ...]) -> dict[str, str]:
    """Return the values of `--set NAME=VALUE`."""
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not name or not sign:
            raise LayoutError(
                f"--set is {text!r}; write NAME=VALUE, as in --set TP=8 or --set 1=70b"
            )
        found[name] = value
    return found


def _call(given: dict[str, Any], configs: dict[str, LaunchConfig], module: str) -> dict[str, Any]:
    """Return the arguments of a command for one module.

    The GPUs per host are taken from the first file unless `--on` is given.
    """
    layouts = {name: str(config.layouts[module]) for name, config in configs.items()}
    call = given | layouts | {"world_size": None}
    context = click.get_current_context()
    first = next(iter(configs.values()))
    if "views" in call and not (given.get("after") or given.get("target")):
        call["views"] = [*format_views(first.views[module]), *call["views"]]
    is_default = context.get_parameter_source("on") is ParameterSource.DEFAULT
    if is_default and first.gpus_per_node:
        call["on"] = (str(first.gpus_per_node),)
    return call
