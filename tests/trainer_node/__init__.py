"""Tests of the trainer, on real Megatron."""

from trainer_node.model import cudnn

cudnn.load()  # on GPUs, as a trainer does: before anything imports TransformerEngine
