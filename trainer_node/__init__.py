"""Job message in, HF-named merged tensors out. The only package that imports Megatron."""
