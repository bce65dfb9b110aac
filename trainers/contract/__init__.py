"""What the controller, the node agents and the ranks agree on: names of files and variables, and records in JSON.

The standard library of Python 3.9 is enough: these modules travel to hosts together with the agent.
"""
