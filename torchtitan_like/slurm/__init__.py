"""Batch scripts for Slurm, and the commands that they call."""
