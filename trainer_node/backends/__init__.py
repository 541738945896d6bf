"""Megatron on this machine: stand-ins on a CPU, kernel libraries on a GPU."""
