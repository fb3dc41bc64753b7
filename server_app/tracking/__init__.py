"""A run's numbers for the tools that watch it: Prometheus, TensorBoard, MLflow, Weights & Biases.

Each is a file here, imported only when the setting `tracking` names it.
"""
