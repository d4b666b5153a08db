"""Users' graphs as arrays and PyG's objects."""
