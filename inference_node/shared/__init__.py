"""Shared by the node, the API process and the workers. Imports neither torch nor vLLM."""
