"""The version of turnout, on its own so that a build can read it without importing torch."""

__version__ = "0.2.0"
