"""`hypercomm draw`: a layout, a change of layout or a mapping as a picture."""

from hypercomm.cli.drawing.command import draw as draw

__all__ = ["draw"]
