"""Reproduce a finished run: its recipe, its code in a separate checkout, the comparison, and the export archive.

Entry points: ``reproduce``, ``archive`` (``doit export``) and ``recipe.from_mlflow`` (a run recorded by another host).
"""
