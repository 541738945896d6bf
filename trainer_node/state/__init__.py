"""The trainer's state on disk: checkpoints, and how they are replaced as a whole."""
