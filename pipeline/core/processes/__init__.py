"""Processes and threads of the controller: starting, interrupting, waiting, and unexpected ends."""
