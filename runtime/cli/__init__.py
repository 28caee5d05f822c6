"""The command `tilefuse`."""

from runtime.cli.app import main

__all__ = ["main"]
