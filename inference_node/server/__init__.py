"""Code of vLLM's API process: the door to its routes, the alias, and the node's actions."""
