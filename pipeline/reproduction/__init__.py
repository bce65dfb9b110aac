"""A finished run made again elsewhere: its recipe, its code in a checkout of its own, the comparison, the archive.

Public face: ``reproduce``, ``archive`` (``doit export``) and ``from_mlflow`` (a run that another machine recorded).
"""
