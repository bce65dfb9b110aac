"""The evaluation report of a finished run, made by scikit-learn in a separate process, and its key."""
