"""Views of runs and sweeps under way, and notices of their end."""
