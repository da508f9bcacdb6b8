"""Finds the rank that a hung job waits for, from the calls that the ranks of the job recorded."""
