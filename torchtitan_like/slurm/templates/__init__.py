"""Files that `titan slurm init` copies. Python files here import the standard library only."""
