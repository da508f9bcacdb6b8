"""Scenes as SVG: one text that needs nothing else, readable on white and on black."""
