"""Lets the ranks of a job agree: the protocol, its driver, and the agreement of a grid."""
