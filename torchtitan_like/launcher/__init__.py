"""The launcher of `titan train`: read options, check the config, start ranks, report the end.

This room does not import torch: the launcher process is small, and the ranks are other processes.
"""
