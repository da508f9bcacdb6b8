"""What the real ranks of tests do: one module for each file of tests, or a few."""
