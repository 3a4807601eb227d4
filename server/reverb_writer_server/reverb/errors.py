"""Errors of the Reverb process that the service tells apart. Without dm-reverb, so that the service can load them."""

from __future__ import annotations


class UnrestorableError(RuntimeError):
    """Reverb refuses a checkpoint: it is damaged, or does not fit the tables."""
