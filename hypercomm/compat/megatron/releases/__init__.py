"""Which release of Megatron is meant, and what its source holds."""
