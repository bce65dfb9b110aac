"""The contract between controller and nodes: names of files and variables, and the records that they exchange.

Standard library only, Python 3.9 or newer, because the controller half, the node half and the agent that travels to a
host import it. A name that is defined here stands nowhere else as a literal (tests/architecture/test_contract.py).
"""
