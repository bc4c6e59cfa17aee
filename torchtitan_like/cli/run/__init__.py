"""`titan run`: list, watch, compare, replay, save and stop runs."""
