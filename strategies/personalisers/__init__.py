"""The ways to personalise, one a file; their common Protocol is `regionfed.personaliser`."""
