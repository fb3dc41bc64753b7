"""The device: gradients and scores of one client's own examples."""
