"""The arithmetic of ranks: layouts and groups. Nothing here imports torch."""

from __future__ import annotations

from hypercomm.layout.groups import RankGroups as RankGroups
from hypercomm.layout.layout import RankLayout as RankLayout, read_layout as read_layout

__all__ = ["RankGroups", "RankLayout"]
