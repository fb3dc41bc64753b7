"""RegionFed: what all tiers share (contract, configuration, vector codec, privacy)."""

__version__ = "0.1.0"
