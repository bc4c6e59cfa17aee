"""Checks and measurements of machines, before a run."""
