"""Users' graphs as tables of nodes and edges."""
