"""The disjoint groups of some dims."""
