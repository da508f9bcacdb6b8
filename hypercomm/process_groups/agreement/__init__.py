"""How the ranks of a job agree: one primitive, its driver, and what waiting ranks report."""
