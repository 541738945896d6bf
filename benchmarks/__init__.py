"""One harness, one JSON format, baselines next to it."""
