"""Programs beside the trainer: small checkpoints, and the independent reference."""
