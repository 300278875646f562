"""What happens around training: weight sync, scoring, logging, evaluation, summary."""
