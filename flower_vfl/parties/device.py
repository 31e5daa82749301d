"""The device that a party computes on."""

import torch

from flower_vfl.errors import ConfigError


def resolve_device(name: str | torch.device = "auto") -> torch.device:
    """Return a device for a name from a config."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ConfigError(
            f"the device '{name}' is not to be had here ({reason}); use auto or cpu"
        ) from error
    return device
