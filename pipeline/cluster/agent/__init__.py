"""The node agent: code that a launcher sends to a host, to probe it, start ranks and follow them. Python 3.9 alone."""
