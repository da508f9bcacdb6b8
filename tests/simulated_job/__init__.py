"""Runs the real agreement of ranks in a simulated job, with many schedules and faults."""
