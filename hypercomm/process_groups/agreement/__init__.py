"""What the ranks of a job tell each other."""
