"""The node agent, which a launcher runs on a host: standard library only, Python 3.9 or newer."""
