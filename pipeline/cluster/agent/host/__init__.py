"""What a host is: its facts, whom it reaches, its environments and folders."""
