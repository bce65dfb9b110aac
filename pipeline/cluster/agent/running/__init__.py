"""A run on a host: the start of an attempt, its supervisor, and the observation of its ranks."""
