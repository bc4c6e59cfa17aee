"""The label that the loss ignores, for data, models and the loss."""

IGNORED_LABEL = -100  # torch's default `ignore_index`
