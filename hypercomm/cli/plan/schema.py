"""The JSON schema of what `hypercomm plan --json` prints."""

from __future__ import annotations

from typing import Any

from hypercomm.cli.printing import by_name, list_of, one_object, or_null, said

_TEXT = {"type": "string"}
_COUNT, _INDEX = {"type": "integer", "minimum": 1}, {"type": "integer", "minimum": 0}
_RANGE = list_of(_INDEX)
_COORDS = by_name(_INDEX)

_GROUPS = one_object(
    view=said(or_null(_TEXT), "the view that the dims belong to; null: the layout"),
    dims=list_of(_TEXT),
    groups=said(_COUNT, "how many groups the dims make"),
    size=said(_COUNT, "the ranks of each"),
    strides=said(list_of(_COUNT), "ranks between neighbours along each dim"),
    example=said(list_of(_INDEX), "the first ranks of the rank's own group"),
    last=said(_INDEX, "the last one"),
    hosts_per_group=said(_RANGE, "the fewest and the most hosts that a group reaches"),
)

_COUNTED = one_object(
    process_groups=said(_INDEX, "of each rank"),
    communicators=said(_INDEX, "those of two ranks or more"),
    nccl_bytes=said(_INDEX, "device memory of their buffers, about"),
    gloo_sockets=said(_INDEX, "one to each other member"),
)
_SHARES = one_object(never=_COUNTED, identical=_COUNTED)

_PLACE = one_object(rank=_INDEX, host=_INDEX, coords=_COORDS, views=by_name(_COORDS))

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "hypercomm plan --json",
    **one_object(
        ("places",),
        layout=_TEXT,
        ranks=_COUNT,
        rank_offset=_INDEX,
        hosts=_COUNT,
        gpus_per_node=_COUNT,
        rank=said(_INDEX, "the one whose groups are shown"),
        coords=_COORDS,
        views=by_name(
            one_object(layout=_TEXT, shared_dims=list_of(_TEXT), coords=_COORDS),
        ),
        groups=said(list_of(_GROUPS), "those asked for; default: every combination of dims"),
        communicators=one_object(
            nccl_channels=_COUNT,
            nccl_bytes_each=_COUNT,
            single_dims=said(_SHARES, "of a rank that creates the groups of each single dim"),
            groups=said(_SHARES, "of a rank that creates all that `groups` lists"),
        ),
        places=said(list_of(_PLACE), "with --ranks"),
    ),
}
