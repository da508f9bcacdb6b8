"""Who sends what to whom between two layouts."""
