"""Pictures of grids, of changes and of mappings: in the terminal, as SVG, PNG and one HTML page."""

from hypercomm.draw.drawing import Drawing as Drawing

__all__ = ["Drawing"]
