"""Read text files and tokenizers."""
