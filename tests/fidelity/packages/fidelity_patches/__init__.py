"""Replaces a function of torch while it is imported, as packages with kernels of their own do."""

import torch.nn.functional as F

WHERE = "installed"

_dropout = F.dropout


def dropout(input, p=0.5, training=True, inplace=False):
    return _dropout(input, p / 2, training, inplace)


F.dropout = dropout
