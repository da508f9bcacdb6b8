"""What callers may give, and how values are shown."""
