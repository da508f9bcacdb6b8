"""The simulated job: it runs the real agreement of ranks, under many schedules and faults."""
