"""NCCL options of Megatron's groups: configuration files, SHARP, and the environment of UCC."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hypercomm.compat.megatron.groups.table import NCCL_KEYS
from hypercomm.errors import ConfigurationError, NcclConfigError
from hypercomm.layout.checks import as_ordered, positive
from hypercomm.layout.text import shown
from hypercomm.process_groups import torch_internals as c10d

logger = logging.getLogger(__name__)

NcclConfig = dict[str, dict[str, Any]]

_HIGH_PRIORITY = "high_priority_stream_groups"
_COLLNET = "NCCL_COLLNET_ENABLE"

_UCC_ENVIRONMENT = {
    "NSYS_UCP_COMM_PARAMS": "1",
    "UCC_CL_BASIC_TLS": "^sharp,nccl",
    "UCX_NET_DEVICES": "all",
    "UCX_RNDV_THRESH": "0",
}
_UCC_DEFAULTS = {
    "TORCH_UCC_BLOCKING_WAIT": "none",
    "UCC_EC_CUDA_STREAM_TASK_MODE": "driver",
    "UCX_TLS": "ib,cuda_copy",
}


def _flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise NcclConfigError(f"{what} must be true or false, got {value!r}")
    return value


def _network(value: object, what: str) -> str:
    if not isinstance(value, str) or value.lower() not in {"ib", "socket"}:
        raise NcclConfigError(f"{what} must be 'IB' or 'socket', got {value!r}")
    return value


_CHECKS: dict[str, Callable[[object, str], object]] = {
    "cga_cluster_size": positive,
    "max_ctas": positive,
    "min_ctas": positive,
    "net_name": _network,
    "is_high_priority_stream": _flag,
}
"""The options of a group, and how each is checked."""


def load(path: str | os.PathLike[str] | None, high_priority: Sequence[str] | None) -> NcclConfig:
    """Read an NCCL configuration file, and add the groups whose stream has a high priority.

    Args:
        path: A yaml file that maps group keys to options; None for no file.
        high_priority: Keys of groups.

    Raises:
        FileNotFoundError, IsADirectoryError: There is no such file, or it is none.
        NcclConfigError: It cannot be read, or a key or value is none of Megatron's; pyyaml, which
            the extra `nccl-config` brings, is not installed.
    """
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise NcclConfigError(f"nccl_communicator_config_path must be a path, got {path!r}")
    config = {} if path is None else _read(Path(path))
    for key in as_ordered(() if high_priority is None else high_priority, _HIGH_PRIORITY):
        if not isinstance(key, str) or key not in NCCL_KEYS:
            raise NcclConfigError(
                f"high_priority_stream_groups names no group {shown(key)}; use some of {NCCL_KEYS}"
            )
        overwrite_nccl_comm_cfgs(config, key, ("is_high_priority_stream", True))
    return config


def _read(path: Path) -> NcclConfig:
    try:
        import yaml
    except ImportError as error:
        raise NcclConfigError(
            f"nccl_communicator_config_path={str(path)!r} needs pyyaml; "
            f"pip install 'hypercomm[nccl-config]'"
        ) from error
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError) as error:
        reason = f"nccl_communicator_config_path: {error.strerror}"
        raise type(error)(error.errno, reason, str(path)) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise NcclConfigError(f"{path} is not yaml: {error}") from error
    except (OSError, ValueError) as error:
        raise NcclConfigError(
            f"nccl_communicator_config_path={str(path)!r} cannot be read: {error}"
        ) from error
    for key, options in _mapping(content, f"{path}").items():
        if key not in NCCL_KEYS:
            raise NcclConfigError(f"{path} names no group {key!r}; use some of {NCCL_KEYS}")
        for name, value in _mapping(options, f"{path}: group {key!r}").items():
            if name not in _CHECKS:
                raise NcclConfigError(
                    f"{path}: group {key!r} has no option {name!r}; use some of {list(_CHECKS)}"
                )
            _check(name, value, f"{path}: group {key!r}")
    return content  # type: ignore[no-any-return]


def _check(name: str, value: object, where: str) -> None:
    try:
        _CHECKS[name](value, name)
    except ValueError as error:
        raise NcclConfigError(f"{where}: {error}") from error


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise NcclConfigError(f"{what} must map names to values, got {shown(value)}")
    return value


def _options_of(nccl_comm_cfgs: object, pg_name: object) -> Mapping[str, Any] | None:
    """Read what an NCCL configuration has for a group."""
    if not isinstance(pg_name, str):
        raise NcclConfigError(f"pg_name must be the key of a group, got {shown(pg_name)}")
    configured = _mapping(nccl_comm_cfgs, "nccl_comm_cfgs")
    if pg_name not in configured:
        return None
    return _mapping(configured[pg_name], f"nccl_comm_cfgs of group {pg_name!r}")


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, Mapping[str, Any]]) -> Any:
    """Make the `ProcessGroupNCCL.Options` of a group, or None where nothing is configured for it.

    Raises:
        NcclConfigError: A value is none of NCCL's, or this torch was built without NCCL.
    """
    own = _options_of(nccl_comm_cfgs, pg_name)
    if own is None:
        return None
    config = {name: value for name, value in own.items() if name in _CHECKS}
    for name, value in config.items():
        _check(name, value, f"NCCL options of group {pg_name!r}")
    if not hasattr(dist, "ProcessGroupNCCL"):
        raise NcclConfigError(
            f"NCCL options {config} for group {pg_name!r} need a torch that is built with NCCL"
        )
    priority = config.pop("is_high_priority_stream", False)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=priority)
    for name, value in config.items():
        setattr(options.config, name, value)
    return options


class OptionsByKey:
    """The options of each group of a configuration: one object for equal options.

    Groups that have one object as their options can be one group. Options that no backend of WORLD
    takes are left out, and the log says so.

    Args:
        nccl_config: As `load` returns it.
    """

    def __init__(self, nccl_config: NcclConfig) -> None:
        self._nccl_config = nccl_config
        self._made: dict[str, Any] = {}

    def of(self, key: str) -> Any:
        """Return the options of a group, by its key, or None."""
        wanted = repr(self._nccl_config.get(key))
        if wanted not in self._made:
            options = get_nccl_options(key, self._nccl_config)
            self._made[wanted] = None if options is None else _with_effect(key, options)
        return self._made[wanted]


def _with_effect(key: str, options: Any) -> Any:
    backend = c10d.default_backend()
    if any(map(c10d.takes_options, c10d.single_backends(backend))):
        return options
    logger.warning("NCCL options of group %r have no effect on %r", key, backend)
    return None


def overwrite_nccl_comm_cfgs(
    nccl_comm_cfgs: NcclConfig, pg_name: str, key_value_pair: tuple[str, Any]
) -> None:
    """Set one option of one group in an NCCL configuration.

    Raises:
        NcclConfigError: There is no configuration, no key of a group, or no pair.

    Example:
        >>> config = {}
        >>> overwrite_nccl_comm_cfgs(config, "dp", ("max_ctas", 8))
        >>> config
        {'dp': {'max_ctas': 8}}
    """
    _options_of(nccl_comm_cfgs, pg_name)
    pair = key_value_pair
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
        raise NcclConfigError(f"key_value_pair must be ('max_ctas', 8) or alike, got {shown(pair)}")
    key, value = pair
    nccl_comm_cfgs.setdefault(pg_name, {})[key] = value


@contextlib.contextmanager
def environment(pipeline_backend: str | None) -> Iterator[None]:
    """Set what the backends read from the environment; put all of it back if the block fails.

    Raises:
        ConfigurationError: UCC would have only one hardware queue.
    """
    ucc = pipeline_backend == "ucc"
    if ucc and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ConfigurationError(
            "pipeline_model_parallel_comm_backend='ucc' needs the environment's "
            "CUDA_DEVICE_MAX_CONNECTIONS to be more than 1, or not set"
        )
    before = dict(os.environ)
    try:
        os.environ.pop(_COLLNET, None)
        if ucc:
            os.environ.update({**_UCC_DEFAULTS, **os.environ, **_UCC_ENVIRONMENT})
        yield
    except BaseException:
        os.environ.clear()
        os.environ.update(before)
        raise


@contextlib.contextmanager
def sharp() -> Iterator[Callable[[dist.ProcessGroup | None], None]]:
    """Let the one group that is created within use SHARP, and no later one.

    NCCL gives it to the first communicator, which exists only after its first collective: the
    block must call what it gets with the group.
    """

    def connect(group: dist.ProcessGroup | None) -> None:
        if group is None:
            return
        cuda = torch.cuda.is_available()
        dist.barrier(group=group, device_ids=[torch.cuda.current_device()] if cuda else None)
        if cuda:
            torch.cuda.synchronize()

    logger.info("SHARP is for one group; without SHARP switches NCCL falls back by itself")
    os.environ[_COLLNET] = "1"
    try:
        yield connect
    finally:
        os.environ.pop(_COLLNET, None)
