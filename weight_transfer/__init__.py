"""Sends merged tensors over NCCL or TCP, and digests them.

This package imports torch, cupy for NCCL, and the message types of `orchestrator.protocol`.
"""
