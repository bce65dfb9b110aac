"""The observation of processes that run user-defined code: which files, variables and modules they read ("the seal" in
docs/seal.md), and which of these the run's key doesn't cover ("unkeyed")."""
