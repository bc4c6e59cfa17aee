"""`titan slurm`: run on Slurm."""
