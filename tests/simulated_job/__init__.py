"""The simulated job: how ranks agree, on the real code, under many schedules and faults."""

from simulated_job.job import (
    Client,
    Fault,
    Job,
    Made,
    Server,
    attempt,
    gate,
    interrupt_in,
    mark,
    now,
    simulate_job,
    sleep,
    this_rank,
    thread,
)

__all__ = [
    "Client",
    "Fault",
    "Job",
    "Made",
    "Server",
    "attempt",
    "gate",
    "interrupt_in",
    "mark",
    "now",
    "simulate_job",
    "sleep",
    "this_rank",
    "thread",
]
