"""The world: the ServerApp, the wiring of the tiers, checkpoints and the report."""
