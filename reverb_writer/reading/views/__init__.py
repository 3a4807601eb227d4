"""Datasets as the frameworks have them; each module imports its framework when it is called for."""
