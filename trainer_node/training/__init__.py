"""Turns a batch into optimizer steps: packing, losses, sums, AdamW."""
