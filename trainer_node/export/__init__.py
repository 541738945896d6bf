"""Exports merged tensors with HF names, to the wire and to disk."""
