"""One harness, one JSON format, baselines beside it."""
