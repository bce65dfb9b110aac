"""The node half of Paceline: the code that runs on every compute node, which needs only Python and torch for it. Most
modules directly in this package are programs; ``entry`` and ``checkpoint`` are shared by them."""
