"""The ``flower-vfl`` command: one file per subcommand."""
