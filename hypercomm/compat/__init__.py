"""Other people's names, on top of grids: legacy code changes an import, or nothing at all."""
