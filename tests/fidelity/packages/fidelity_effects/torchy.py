"""Settings of torch and numpy that are made by an import."""

import numpy as np
import torch

torch.set_default_dtype(torch.float64)
torch.manual_seed(123)
np.random.seed(123)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_float32_matmul_precision("medium")
torch.autograd.set_detect_anomaly(True)
torch.set_printoptions(precision=2)
torch.set_num_threads(2)
torch.multiprocessing.set_sharing_strategy("file_system")
np.seterr(over="ignore")
np.set_printoptions(precision=3)
