"""The world's learning: the Flower Strategy, server optimisers, personalisers."""
