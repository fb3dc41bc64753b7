"""The way between a region's uplink and its coordinator: one authenticated gRPC service."""
