"""Repeating a finished run: its recipe, its code in a separate checkout, the comparison, the proof, the archive."""
