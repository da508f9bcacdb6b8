"""What parallel_state holds, and its getters."""
