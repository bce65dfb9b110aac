"""How requests reach the node agents of hosts, and how their answers and files come back."""
