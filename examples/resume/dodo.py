"""Marks this folder as a project of its own: runs, data and records lie here. Tasks of your own may stand below."""

from pipeline.cli.project import *  # noqa: F403
