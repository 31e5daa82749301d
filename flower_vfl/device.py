"""The device that a party computes on."""

import torch


def resolve_device(name: str | torch.device = "auto") -> torch.device:
    """Return a device for a name from a config.

    Parameters
    ----------
    name : str | torch.device (default: "auto")
        ``"auto"`` takes a CUDA device where there is one and the CPU otherwise; any
        other name is torch's own (``"cpu"``, ``"cuda:1"``).
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
