"""Writes large files, hashes them, and replaces folders as a whole."""
