"""The same program as every rank of a large job, one after the other, in one process."""
