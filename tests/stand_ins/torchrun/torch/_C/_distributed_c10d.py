"""What trainers/torchrun.py imports of it, before it imports run.py, which never returns."""


class TCPStore:
    """No test with this stand-in opens a store."""
