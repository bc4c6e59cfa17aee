"""Use the model of a checkpoint: generate text for a look, and evaluate it through an export."""
