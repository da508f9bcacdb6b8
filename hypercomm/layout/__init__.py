"""The ground floor: numbers only. Nothing under here imports torch."""

from hypercomm.layout import pipelines as pipelines
from hypercomm.layout.groups.rank_groups import RankGroups as RankGroups
from hypercomm.layout.mapping.rank_mapping import RankMapping as RankMapping
from hypercomm.layout.placing import Card as Card
from hypercomm.layout.placing import Placed as Placed
from hypercomm.layout.placing import Traffic as Traffic
from hypercomm.layout.placing import place as place
from hypercomm.layout.rank_layout import RankLayout as RankLayout

__all__ = ["Card", "Placed", "RankGroups", "RankLayout", "RankMapping", "Traffic", "place"]
