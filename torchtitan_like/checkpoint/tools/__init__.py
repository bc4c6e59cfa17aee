"""Tools for checkpoints on disk: list, verify, compare, convert, export and archive them."""
