"""Sweeps: many runs from one command line, each an ordinary run with a key of its own."""

from pipeline.sweep.expand import Space, expand
from pipeline.sweep.trial import Outcome, Trial, TrialSource

__all__ = ["Outcome", "Space", "Trial", "TrialSource", "expand"]
