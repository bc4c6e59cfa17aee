"""PyTorch-native LLM pretraining. Nothing is imported here; start reading at `train.py`."""

__version__ = "0.1.0"
