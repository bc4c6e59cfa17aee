"""What others write: texts, token files, tokenizers. Looked up where one of them is in question, not read."""
