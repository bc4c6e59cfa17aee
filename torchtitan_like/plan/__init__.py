"""Estimate memory, traffic and time of layouts on N GPUs, and find the best one, without GPUs.

The times come from a simple model. They only rank layouts and are no forecast.
"""
