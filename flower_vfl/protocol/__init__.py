"""Messages between the strategy and the parties, and how a node answers them."""
