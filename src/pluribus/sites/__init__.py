"""Federations of real sites."""
