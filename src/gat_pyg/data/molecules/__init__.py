"""Users' molecules."""
