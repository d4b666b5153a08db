"""Figures of attention, explanations and learning curves."""
