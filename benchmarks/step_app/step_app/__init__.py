"""Times a training step with resident parties beside a plain loop."""
