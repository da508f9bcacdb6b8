"""The simulated job: how ranks agree, on the real code, under many schedules and faults."""
