"""The one error of this room."""

from __future__ import annotations


class CheckpointError(Exception):
    """The checkpoint cannot be served as it is. The text is a plain sentence: what is wrong and what to do."""
