"""The version of this package, where every module can import it without the package's API."""

__version__ = "0.1.0"
