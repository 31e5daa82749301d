"""One torch thread: small models are slower with more, and sums would depend on it."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
