"""Starts child processes, restarts them, ends them, and runs blocking calls on threads."""
