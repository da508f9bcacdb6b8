"""Where ranks are, as tests of topologies compare it."""


def units(topology):
    """The names of the units of each rank, by level."""
    return {level.name: [level.names[unit] for unit in level.of_rank] for level in topology.levels}
