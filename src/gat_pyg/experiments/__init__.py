"""Settings in, results out."""
