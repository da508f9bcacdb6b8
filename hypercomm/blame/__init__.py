"""Blame: which rank a hung job waits for, from the calls that its ranks recorded."""
