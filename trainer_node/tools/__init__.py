"""Programs next to the trainer: small checkpoints, and the independent reference."""
