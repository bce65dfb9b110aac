"""The host: its facts, the hosts that it reaches, its environments and folders."""
