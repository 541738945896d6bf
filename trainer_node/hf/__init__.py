"""HF's side of a model: checkpoints, configs, the hub, block-scaled FP8."""
