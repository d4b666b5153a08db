"""The graph structure that the operation reads."""
