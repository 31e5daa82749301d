"""The Flower app of the label-leakage experiments."""
