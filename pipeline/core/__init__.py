"""Foundations of the controller half: specs, errors, files, processes, secrets, options."""
