"""Moves requests: everything with state, time or a socket."""

__version__ = "0.1.0"
