"""Sources of prompts, one a file."""
