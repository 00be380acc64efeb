"""A module of the script's own that seeds while it is imported, as many projects' `utils` do."""

import random

import numpy as np
import torch

random.seed(21)
np.random.seed(21)
torch.manual_seed(21)
