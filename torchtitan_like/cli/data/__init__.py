"""The verbs of `titan data`."""
