"""NCCL options of Megatron's groups: configuration files, SHARP, and the environment of UCC."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hypercomm.compat.megatron.configuration import Configuration
from hypercomm.compat.megatron.table import NCCL_KEYS
from hypercomm.errors import ConfigurationError
from hypercomm.layout.checks import as_ordered, check_choice
from hypercomm.layout.text import shown
from hypercomm.process_groups import torch_internals as c10d

logger = logging.getLogger(__name__)

NcclConfig = dict[str, dict[str, Any]]

_COLLNET = "NCCL_COLLNET_ENABLE"
_PRIORITY = "is_high_priority_stream"
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


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the `ProcessGroupNCCL.Options` of a group, or None if none are configured for it.

    Raises:
        ConfigurationError: NCCL does not take an option, or this torch was built without NCCL.
    """
    own = nccl_comm_cfgs.get(pg_name)
    if own is None:
        return None
    if not hasattr(dist, "ProcessGroupNCCL"):
        raise ConfigurationError(
            f"group {pg_name!r} has NCCL options, and this torch was built without NCCL"
        )
    try:
        given = dict(own)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=given.pop(_PRIORITY, False))
        for name, value in given.items():
            setattr(options.config, name, value)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"NCCL does not take the options {own} of group {pg_name!r}: {error}"
        ) from error
    return options


def options_by_key(config: Configuration) -> dict[str, Any]:
    """Return the options of groups by key, from the file of a configuration and its priorities.

    Equal options are one object, so that groups with them can be shared. Options that the backend
    of WORLD does not take are left out with a warning in the log.

    Raises:
        OSError: The file cannot be read.
        ConfigurationError: It has other content than group keys and NCCL options; or pyyaml, which
            the extra `nccl-config` installs, is missing.
        NotInitializedError: There are options, but no job, whose backend decides if they have an
            effect.
    """
    path, preferred = config.nccl_communicator_config_path, config.high_priority_stream_groups
    options: NcclConfig = {} if path is None else _read(path)
    for key in as_ordered(preferred, "high_priority_stream_groups") if preferred else ():
        overwrite_nccl_comm_cfgs(options, key, (_PRIORITY, True))
    if not options:
        return {}
    for key in options:
        check_choice("a group of the NCCL configuration", key, NCCL_KEYS, ConfigurationError)
    backend = c10d.default_backend()
    if not any(map(c10d.takes_options, c10d.single_backends(backend))):
        logger.warning("NCCL options of groups %s have no effect on %r", [*options], backend)
        return {}
    made = {repr(own): get_nccl_options(key, options) for key, own in options.items()}
    return {key: made[repr(own)] for key, own in options.items()}


def _read(path: str) -> NcclConfig:
    try:
        import yaml

        content = yaml.safe_load(Path(path).read_bytes())
    except ImportError as error:
        raise ConfigurationError(
            f"nccl_communicator_config_path={path!r} needs pyyaml; "
            f"pip install 'hypercomm[nccl-config]'"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not yaml: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} must map groups to options, got {shown(content)}")
    return content


def overwrite_nccl_comm_cfgs(
    nccl_comm_cfgs: NcclConfig, pg_name: str, key_value_pair: tuple[str, Any]
) -> None:
    """Set one option of one group in an NCCL configuration.

    Example:
        >>> config = {}
        >>> overwrite_nccl_comm_cfgs(config, "dp", ("max_ctas", 8))
        >>> config
        {'dp': {'max_ctas': 8}}
    """
    key, value = key_value_pair
    nccl_comm_cfgs.setdefault(pg_name, {})[key] = value


@contextlib.contextmanager
def environment(pipeline_backend: str | None) -> Iterator[None]:
    """Set the environment variables of the backends; restore them if the block fails.

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
    os.environ.pop(_COLLNET, None)
    if ucc:
        os.environ.update({**_UCC_DEFAULTS, **os.environ, **_UCC_ENVIRONMENT})
    try:
        yield
    except BaseException:
        os.environ.clear()
        os.environ.update(before)
        raise


def create_with_sharp(
    create: Callable[[], list[dist.ProcessGroup | None]],
) -> list[dist.ProcessGroup | None]:
    """Create one group with SHARP enabled.

    NCCL uses it for the first communicator, which exists only after its first collective.

    Args:
        create: Creates the group.
    """
    os.environ[_COLLNET] = "1"
    try:
        groups = create()
        if groups[0] is not None:
            device = [torch.cuda.current_device()] if torch.cuda.is_available() else None
            dist.barrier(group=groups[0], device_ids=device)
            if device is not None:
                torch.cuda.synchronize()
        return groups
    finally:
        os.environ.pop(_COLLNET, None)
