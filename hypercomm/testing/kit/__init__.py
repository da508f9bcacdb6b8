"""Bodies of tests on real ranks: what travels there, what came of it, and hypothesis around it."""
