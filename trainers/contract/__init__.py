"""What controller, node agents and ranks agree on: names of files and variables, and records. Python 3.9 alone."""
