"""The node half of Paceline: the code that runs on every compute node, for which a node needs only Python and torch.
Most modules directly in this package are programs; they share ``entry`` and ``checkpoint``."""
