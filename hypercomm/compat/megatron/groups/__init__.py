"""Which groups Megatron has, as a table, and how they are made of grids."""
