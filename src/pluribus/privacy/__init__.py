"""Differential privacy: what bounds the influence of one row, or of one client, on everything that is sent."""
