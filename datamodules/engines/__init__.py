"""Engines that sample completions from a snapshot, one a file."""
