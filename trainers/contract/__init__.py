"""What the controller and the nodes agree on: names of files and variables, and the records that pass between them.

Standard library only, Python 3.9 or newer: the controller half, the node half and the agent that travels to a host all
import it. A name that is defined here stands nowhere else as a literal (tests/architecture/test_contract.py).
"""
