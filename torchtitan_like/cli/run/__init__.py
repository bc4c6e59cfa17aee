"""`titan run`: list, watch, report, compare, replay, save and stop runs."""
