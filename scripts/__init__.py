"""Scripts that make what the project ships, and run it."""
