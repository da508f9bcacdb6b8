"""Placing: how the groups of a layout lie on a machine, and in which order they lie better."""

from hypercomm.layout.placing.cards import Card as Card
from hypercomm.layout.placing.place import place as place
from hypercomm.layout.placing.placed import Placed as Placed
from hypercomm.layout.placing.placed import Proposal as Proposal
from hypercomm.layout.placing.spread import Spread as Spread
from hypercomm.layout.placing.traffic import Traffic as Traffic

__all__ = ["Card", "Placed", "Proposal", "Spread", "Traffic", "place"]
