"""This node in a job of a scheduler: one module for each, of which an agent takes the one that its request names.

Each has ``who()`` (this node's name, its number among the job's nodes, how often the job was requeued),
``own_address()``, ``secrets(request)`` (the ranks' secret variables, and the rules that mask them) and ``REQUEUES``.
"""
