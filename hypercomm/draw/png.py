"""PNG: an SVG as pixels, by resvg where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypercomm.errors import DrawingError, MissingPackageError

ZOOM = 2
"""Pixels for each of the SVG's, so that letters are sharp on screens of many of them."""

MOST_PIXELS = 1 << 26
"""More than this is not made: a picture of so many needs half a gigabyte of memory."""

_SIZE = re.compile(r'(?:width|height)="([0-9.]+)"')

_TEXT = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}'
    '<rect width="20" height="20" fill="#fff"/><text x="2" y="16" font-size="16">{}</text></svg>'
)


def png_of(svg: str) -> bytes:
    """Return an SVG as PNG, in light colours.

    Where the machine has no fonts, those of matplotlib are taken; where there are none either, a
    warning says that the picture has no letters.

    Args:
        svg: The SVG, which says its width and height.

    Raises:
        MissingPackageError: resvg-py is not installed; says how to install it.
        DrawingError: The picture is too large, or cannot be made.
    """
    try:
        svg_to_bytes = importlib.import_module("resvg_py").svg_to_bytes
    except ImportError as error:
        raise MissingPackageError(
            "a PNG needs resvg-py: pip install 'hypercomm[draw]', or save it as SVG or HTML"
        ) from error
    width, height = (float(size) for size in _SIZE.findall(svg)[:2])
    zoom = ZOOM if width * height * ZOOM**2 <= MOST_PIXELS else 1
    if width * height > MOST_PIXELS:
        raise DrawingError(
            f"a PNG of {width:,.0f} x {height:,.0f} pixels is too large; save it as SVG or "
            f"HTML, or draw fewer dims"
        )
    fonts = _fonts(svg_to_bytes)
    try:
        return bytes(svg_to_bytes(svg_string=svg, zoom=zoom, **fonts))
    except ValueError as error:
        raise DrawingError(f"the picture cannot be written as PNG: {error}") from error


def _fonts(svg_to_bytes: Callable[..., bytes]) -> dict[str, Any]:
    """Return what resvg is told of fonts: nothing, where the machine's will do."""
    family = {"font_family": "DejaVu Sans", "sans_serif_family": "DejaVu Sans"}
    if _shows_letters(svg_to_bytes, {}):
        return {"sans_serif_family": "DejaVu Sans"}
    matplotlib = importlib.util.find_spec("matplotlib")
    places = matplotlib.submodule_search_locations if matplotlib else None
    found = [Path(place) / "mpl-data" / "fonts" / "ttf" for place in places or ()]
    files = [str(file) for folder in found for file in sorted(folder.glob("DejaVuSans*.ttf"))]
    given = {"font_files": files, **family}
    if files and _shows_letters(svg_to_bytes, given):
        return given
    warnings.warn(
        "no fonts were found, so the PNG has no letters; install fonts-dejavu, or matplotlib",
        stacklevel=4,
    )
    return {}


def _shows_letters(svg_to_bytes: Callable[..., bytes], fonts: dict[str, Any]) -> bool:
    style = '<style>text{font-family:system-ui,"DejaVu Sans",Arial,sans-serif}</style>'
    with_text, without = (_TEXT.format(style, text) for text in ("8", ""))
    return bytes(svg_to_bytes(svg_string=with_text, **fonts)) != bytes(
        svg_to_bytes(svg_string=without, **fonts)
    )
