"""What the node, the API process and the workers share. It imports neither torch nor vLLM."""
