"""Bytes in, served alias out. The only package that imports vLLM."""
