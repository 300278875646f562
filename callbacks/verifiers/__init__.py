"""Judges of one completion against one answer, one a file."""
