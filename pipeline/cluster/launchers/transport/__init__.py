"""Requests to the node agents of hosts, and the way back of their answers and files."""
