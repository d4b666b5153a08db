"""Figures of attention and explanations."""
