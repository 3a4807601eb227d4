"""Connections and streams to a Reverb server; the only package that imports grpc."""
