"""The Hydra configuration: one group an axis that people swap, one object a file."""
