"""What the agent does for a run on a host: start an attempt, supervise its torchrun, and observe its ranks."""
