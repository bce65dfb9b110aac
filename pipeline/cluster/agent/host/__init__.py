"""What the agent finds out about a host: its facts, its load, the hosts that it reaches; and Python environments."""
