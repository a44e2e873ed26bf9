"""What `pluribus reproduce` runs: tables of papers, a TOML file each, and ours beside the paper's figures."""
