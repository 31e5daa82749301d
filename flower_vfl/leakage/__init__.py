"""How much gradients and models tell about labels: attacks, the meter, limits."""
