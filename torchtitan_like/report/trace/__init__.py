"""Read the profiler traces of all ranks: times of each step, one clock, and one merged trace."""
