"""`grid.watch`: what each rank last called, written down when nothing moves any more."""

from hypercomm.watch.watch import Watch as Watch

__all__ = ["Watch"]
