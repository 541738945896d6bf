"""Where HF tensors' elements are in Megatron's parameters, and on which rank."""
