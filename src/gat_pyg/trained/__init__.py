"""Finished runs: their models, predictions, scores and explanations."""
