"""Federations over the network, by Flower."""
