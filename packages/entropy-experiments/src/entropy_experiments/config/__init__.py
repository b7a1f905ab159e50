"""The configuration of a run: strict YAML. `documents` reads the dialect of documents 001 to 004.

An unknown key, a value of the wrong kind or two spellings that disagree are refused with the file,
the line and the dotted key, before torch is imported.
"""

from entropy_experiments.config.documents import renamed
from entropy_experiments.config.keys import every_key
from entropy_experiments.config.model import Config, json_schema, known_fields
from entropy_experiments.config.problems import ConfigError
from entropy_experiments.config.reading import (
    DEFAULT_TEMPLATE,
    DOCUMENTS_TEMPLATES,
    FULL_TEMPLATE,
    TRAINING_TEMPLATES,
    as_config,
    config_yaml,
    documented_yaml,
    load_config,
    parse_config,
    template,
    template_names,
    template_text,
)
from entropy_experiments.config.training import TrainingConfig
from entropy_experiments.config.training_reading import (
    load_preset,
    load_training,
    migrated_yaml,
    parse_training,
    training_schema,
    training_yaml,
)

__all__ = [
    "DEFAULT_TEMPLATE",
    "DOCUMENTS_TEMPLATES",
    "FULL_TEMPLATE",
    "TRAINING_TEMPLATES",
    "Config",
    "ConfigError",
    "TrainingConfig",
    "as_config",
    "config_yaml",
    "documented_yaml",
    "every_key",
    "json_schema",
    "known_fields",
    "load_config",
    "load_preset",
    "load_training",
    "migrated_yaml",
    "parse_config",
    "parse_training",
    "renamed",
    "template",
    "template_names",
    "template_text",
    "training_schema",
    "training_yaml",
]
