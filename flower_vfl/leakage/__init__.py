"""How much gradients and models tell about labels: attacks, the meter, limits."""

from . import attacks as attacks  # first: it exports the meter, which needs it
