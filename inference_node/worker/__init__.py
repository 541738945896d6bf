"""Code of vLLM's worker processes: receives weights, puts them in place, digests them."""
