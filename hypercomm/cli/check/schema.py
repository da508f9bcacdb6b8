"""The JSON schema of what `hypercomm check --json` prints."""

from __future__ import annotations

from typing import Any

from hypercomm.cli.check.request import COLLECTIVES


def _one_object(**properties: Any) -> dict[str, Any]:
    """Describe an object that has exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _said(schema: dict[str, Any], what: str) -> dict[str, Any]:
    return {**schema, "description": what}


_TEXT, _NUMBER, _FLAG = {"type": "string"}, {"type": "number", "minimum": 0}, {"type": "boolean"}
_COUNT, _INDEX = {"type": "integer", "minimum": 1}, {"type": "integer", "minimum": 0}
_COLLECTIVE = {"type": "string", "enum": list(COLLECTIVES)}


def _list_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


_RANK = _one_object(rank=_INDEX, host=_TEXT)

_MESSAGES = _one_object(
    collective=_COLLECTIVE,
    bytes=_said(_COUNT, "the size, as nccl-tests counts it"),
    seconds=_said(_NUMBER, "the mean time on the slowest rank"),
    algbw_bytes_per_s=_said(_NUMBER, "bytes over seconds"),
    busbw_bytes_per_s=_said(_NUMBER, "algbw times the factor of nccl-tests"),
    slowest=_said(_RANK, "the rank that took longest"),
)

_GROUPS = _one_object(
    view=_said(_or_null(_TEXT), "the view that the dims belong to; null: the layout"),
    dims=_list_of(_TEXT),
    groups=_said(_COUNT, "how many groups the dims make"),
    size=_said(_COUNT, "the ranks of each"),
    creation_s=_said(_NUMBER, "to create the group, on the slowest rank"),
    latency_s=_said(_or_null(_NUMBER), "of an all-reduce of 8 bytes; null: groups of one"),
    bandwidth_bytes_per_s=_said(_or_null(_NUMBER), "4 MiB over the time of its all-reduce"),
    slowest=_said(_or_null(_RANK), "the rank with that bandwidth"),
    wrong=_said(_list_of(_TEXT), "results that the layout does not predict"),
    lacking=_said(_list_of(_COLLECTIVE), "what the backend cannot do"),
    sweep=_said(_list_of(_MESSAGES), "with --sizes"),
)

_FAILED = _one_object(
    rank=_INDEX,
    view=_or_null(_TEXT),
    dims=_or_null(_list_of(_TEXT)),
    step=_said(_or_null(_TEXT), "creation, comparison, or a collective that was timed"),
    reason=_TEXT,
)

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "hypercomm check --json",
    **_one_object(
        layout=_TEXT,
        views={"type": "object", "additionalProperties": _TEXT},
        ranks=_COUNT,
        backend=_TEXT,
        ok=_said(_FLAG, "whether all groups were checked and right: the exit code is 0"),
        seconds=_NUMBER,
        groups=_said(_list_of(_GROUPS), "those that were checked on all ranks"),
        failed=_said(_or_null(_FAILED), "the rank that failed first"),
        seen=_said(_TEXT, "what a rank of a launched job saw, when another may have failed"),
    ),
}
