"""Merged tensors in, bytes on the wire. Imports torch (and cupy for NCCL), nothing of the other packages but message types."""
