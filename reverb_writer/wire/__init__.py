"""Reverb's protocol and nothing else: no windows, no observers."""
