"""`titan ckpt`: work with checkpoints."""
