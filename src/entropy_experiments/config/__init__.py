"""The configuration of a run: strict YAML in the documents' own dialect.

An unknown key, a value of the wrong kind or two spellings that disagree are refused with the file,
the line and the dotted key, before torch is imported.
"""

from entropy_experiments.config.model import Config, json_schema, known_fields
from entropy_experiments.config.problems import ConfigError, every_key
from entropy_experiments.config.reading import (
    DEFAULT_TEMPLATE,
    config_yaml,
    documented_yaml,
    load_config,
    parse_config,
    template,
    template_names,
    template_text,
)

__all__ = [
    "DEFAULT_TEMPLATE",
    "Config",
    "ConfigError",
    "config_yaml",
    "documented_yaml",
    "every_key",
    "json_schema",
    "known_fields",
    "load_config",
    "parse_config",
    "template",
    "template_names",
    "template_text",
]
