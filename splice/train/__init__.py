"""`splice train run.toml`: data, reward, loop and run from one file."""
