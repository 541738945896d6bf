"""LoRA adapters: on Megatron's linears, merged into weights, and in PEFT's files."""
