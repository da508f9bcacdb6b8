"""The ranks that are left of a job, or that came, and what they go on with."""
