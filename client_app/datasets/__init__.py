"""Datasets, shared out over regions and devices; each a `FederatedDataset`."""
