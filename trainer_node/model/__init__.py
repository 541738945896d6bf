"""Megatron's model: building it, reading HF checkpoints, and CPU stand-ins for CUDA code."""
