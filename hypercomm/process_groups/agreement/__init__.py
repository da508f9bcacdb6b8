"""How the ranks of a job agree: one primitive, its driver, and calls of all ranks."""
