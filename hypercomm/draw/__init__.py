"""Pictures of grids, of changes and of mappings: in the terminal, as SVG, PNG and one HTML page."""
