"""The process groups of grids: what to create, agreement between ranks, and calls of torch."""
