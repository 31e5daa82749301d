"""Where a run executes: in this process, or under ``flwr run``."""
