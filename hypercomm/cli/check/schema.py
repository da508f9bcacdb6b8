"""The JSON schema of what `hypercomm check --json` prints."""

from __future__ import annotations

from typing import Any

from hypercomm.cli.check.request import COLLECTIVES
from hypercomm.cli.printing import by_name, list_of, one_object, or_null, said

_TEXT, _NUMBER, _FLAG = {"type": "string"}, {"type": "number", "minimum": 0}, {"type": "boolean"}
_COUNT, _INDEX = {"type": "integer", "minimum": 1}, {"type": "integer", "minimum": 0}
_COLLECTIVE = {"type": "string", "enum": list(COLLECTIVES)}

_RANK = one_object(rank=_INDEX, host=_TEXT)

_MESSAGES = one_object(
    collective=_COLLECTIVE,
    bytes=said(_COUNT, "the size, as nccl-tests counts it"),
    seconds=said(_NUMBER, "the mean time on the slowest rank"),
    algbw_bytes_per_s=said(_NUMBER, "bytes over seconds"),
    busbw_bytes_per_s=said(_NUMBER, "algbw times the factor of nccl-tests"),
    slowest=said(_RANK, "the rank that took longest"),
)

_GROUPS = one_object(
    view=said(or_null(_TEXT), "the view that the dims belong to; null: the layout"),
    dims=list_of(_TEXT),
    groups=said(_COUNT, "how many groups the dims make"),
    size=said(_COUNT, "the ranks of each"),
    creation_s=said(_NUMBER, "to create the group, on the slowest rank"),
    latency_s=said(or_null(_NUMBER), "of an all-reduce of 8 bytes; null: groups of one"),
    bandwidth_bytes_per_s=said(or_null(_NUMBER), "4 MiB over the time of its all-reduce"),
    slowest=said(or_null(_RANK), "the rank with that bandwidth"),
    wrong=said(list_of(_TEXT), "results that the layout does not predict"),
    lacking=said(list_of(_COLLECTIVE), "what the backend cannot do"),
    sweep=said(list_of(_MESSAGES), "with --sizes"),
)

_FAILED = one_object(
    rank=_INDEX,
    view=or_null(_TEXT),
    dims=or_null(list_of(_TEXT)),
    step=said(or_null(_TEXT), "creation, comparison, or a collective that was timed"),
    reason=_TEXT,
)

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "hypercomm check --json",
    **one_object(
        layout=_TEXT,
        views=by_name(_TEXT),
        ranks=_COUNT,
        backend=_TEXT,
        ok=said(_FLAG, "whether all groups were checked and right: the exit code is 0"),
        seconds=_NUMBER,
        groups=said(list_of(_GROUPS), "those that were checked on all ranks"),
        failed=said(or_null(_FAILED), "the rank that failed first"),
        seen=said(_TEXT, "what a rank of a launched job saw, when another may have failed"),
    ),
}
