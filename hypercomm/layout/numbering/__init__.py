"""Coordinates and ranks."""
