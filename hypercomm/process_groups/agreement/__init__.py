"""Agreement between the ranks of a job: the protocol, its driver, and the calls of a grid."""
