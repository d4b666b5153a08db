"""Tasks: data, objective and data preparation."""
