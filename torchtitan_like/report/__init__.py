"""Reports on a run, made from the files in its directory."""
