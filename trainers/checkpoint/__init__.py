"""Checkpoints (atomic writes, verified reads), and plain weights with their digest."""
