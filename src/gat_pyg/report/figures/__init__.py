"""Figures and pages of attention, explanations and learning curves."""
