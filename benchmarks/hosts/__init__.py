"""Environments for GPU hosts that reach no package registry."""
