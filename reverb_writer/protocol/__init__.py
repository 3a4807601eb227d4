"""Reverb's messages, tensors, signatures, items and specs as bytes. Pure: no I/O.

messages               the protocol's message classes
tensors                arrays to encoded tensors and back
signatures             table signatures and step specs to nests of `ArraySpec` and back

item_encoding          writing: windows and chunks to bytes of requests

responses              reading: bytes of responses to whole samples
trajectory_parsing     an item's trajectory to chunk slices
"""
