"""A rank among the others: its identity, attempt, device, process group, CPU cores, heartbeat and end by SIGTERM."""
