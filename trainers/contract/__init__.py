"""The contract of controller, ranks and agents: names of files and variables, and records. Python 3.9 alone."""
