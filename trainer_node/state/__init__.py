"""The trainer's state on disk: checkpoints."""
