"""`titan bench`: run a configuration several times with varied settings, and compare the runs."""
