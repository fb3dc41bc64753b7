"""Speed and results, one command each."""
