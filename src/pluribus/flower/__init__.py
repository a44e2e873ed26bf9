"""A federation of real sites, over Flower."""
