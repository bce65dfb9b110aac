"""What runs on a host: the start of an attempt, its supervisor, and what is seen and kept of its ranks."""
