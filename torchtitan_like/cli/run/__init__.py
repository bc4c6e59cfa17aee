"""`titan run`: look after runs."""
