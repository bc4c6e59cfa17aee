"""Use the model of a checkpoint: generate text, and evaluate it."""
