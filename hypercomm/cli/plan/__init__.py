"""`hypercomm plan`: what a layout looks like, and what its groups cost, from arithmetic alone."""

from hypercomm.cli.plan.command import plan as plan

__all__ = ["plan"]
