"""Tables of papers for `pluribus reproduce`: one TOML file each, and the comparison of our results with them."""
