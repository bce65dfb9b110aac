"""The node agent: the code that a launcher sends to a host and runs there, to probe the host, start ranks, follow them.

Standard library only, Python 3.9 or newer. The agent is never installed.
"""
