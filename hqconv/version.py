"""The version, which manifests and journals record."""

__version__ = "0.1.0"
