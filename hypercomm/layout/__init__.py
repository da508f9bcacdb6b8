"""The arithmetic of ranks: layouts, groups, mappings. Nothing here imports torch."""

from __future__ import annotations

from hypercomm.layout.groups import RankGroups as RankGroups
from hypercomm.layout.layout import RankLayout as RankLayout
from hypercomm.layout.layout import read_layout as read_layout
from hypercomm.layout.mapping import RankMapping as RankMapping

__all__ = ["RankGroups", "RankLayout", "RankMapping"]
