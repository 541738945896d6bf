"""Tests of the trainer, on real Megatron."""

import torch

from trainer_node.backends import cudnn

if torch.version.cuda is not None:  # as a trainer does, before anything imports TransformerEngine
    cudnn.load()
