"""The network of real sites, on top of Flower."""
