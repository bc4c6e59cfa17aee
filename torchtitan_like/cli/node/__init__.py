"""`titan node`: check and measure machines."""
