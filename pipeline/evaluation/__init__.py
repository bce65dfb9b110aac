"""The evaluation report of a finished classifier run, made by scikit-learn in a process of its own."""
