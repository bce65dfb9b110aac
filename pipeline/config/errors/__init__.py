"""Errors about a word or file of the configuration: one message that names it and says how to correct it."""
