"""Decides: job queue, version counter, publication, journal. Never touches a tensor."""
