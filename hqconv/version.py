"""The version of hqconv."""

__version__ = "0.3.0"
