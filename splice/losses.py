"""A loss of your own: register it in a module that `trainer.loss_modules` names.

    from splice.losses import LossOutput, register_loss

The trainer imports that module. This one loads no torch.
"""

from trainer_node.training.registry import INPUTS, LossOutput, register_loss

__all__ = ["INPUTS", "LossOutput", "register_loss"]
