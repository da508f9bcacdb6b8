"""`hypercomm check`: every group of a layout on real ranks, communicated over and compared."""

from hypercomm.cli.check.command import check as check

__all__ = ["check"]
