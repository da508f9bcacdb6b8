"""Pictures of layouts, grids, changes and mappings: SVG, PNG, and text for a terminal."""

from hypercomm.tools.draw.drawing import Drawing as Drawing, draw as draw

__all__ = ["Drawing", "draw"]
