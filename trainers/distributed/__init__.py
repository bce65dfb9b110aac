"""A rank among the others: identity, device, process group, CPU cores, import path, heartbeat and attempt."""
