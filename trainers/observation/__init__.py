"""Observation of processes that run user-defined code: what they read, and which of it their key lacks."""
