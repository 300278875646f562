"""Off-policy diagnostics as sums and counts."""
