"""The configuration of a run: TOML file, command line, schema."""

from torchtitan_like.config.loader import load_config, load_stored_config
from torchtitan_like.config.problems import ConfigError, Problem
from torchtitan_like.config.schema import JobConfig
from torchtitan_like.config.toml_text import dump_toml

__all__ = ["ConfigError", "JobConfig", "Problem", "dump_toml", "load_config", "load_stored_config"]
