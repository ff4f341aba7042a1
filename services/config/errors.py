"""The error of a config."""


class ConfigError(ValueError):
    """The config cannot be used; the message names the key and what to do."""
