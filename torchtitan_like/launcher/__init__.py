"""The launcher of `titan train`: read options, check the config, start ranks, report the end.

This package does not import torch: the launcher process is small, and the ranks are other
processes.
"""
