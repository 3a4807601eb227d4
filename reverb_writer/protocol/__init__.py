"""Reverb's messages, tensors, signatures and item encoding as bytes; no windows, no observers. Pure."""
