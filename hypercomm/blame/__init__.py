"""Who a job that hangs waits for, from what its ranks left behind."""
