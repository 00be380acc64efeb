"""Another job of the same warm process: what it imports and changes is no business of the next."""

import torch

import fidelity_effects.torchy
import fidelity_patches
