"""What `titan train` does around a run: read options, check the configuration, start ranks, report the end.

This room imports no torch: the launcher stays small while the ranks run in processes of their own.
"""
