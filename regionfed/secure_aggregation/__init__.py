"""Secure aggregation with distributed noise: pure parts; see docs/secure_aggregation.md."""
