"""Tasks: data, what is predicted and how good a prediction is."""
