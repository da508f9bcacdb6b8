"""The ground floor: numbers only. Nothing under here imports torch."""

from hypercomm.layout import pipelines as pipelines
from hypercomm.layout.groups.rank_groups import RankGroups as RankGroups
from hypercomm.layout.mapping.rank_mapping import RankMapping as RankMapping
from hypercomm.layout.rank_layout import RankLayout as RankLayout

__all__ = ["RankGroups", "RankLayout", "RankMapping"]
