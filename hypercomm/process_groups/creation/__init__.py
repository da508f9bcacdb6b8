"""Making and ending the process group of the calling rank."""
