"""What would happen on N GPUs without having them: memory, traffic, time and the best layout.

The times come from a model of a few lines. They put layouts in order and are no forecast.
"""
