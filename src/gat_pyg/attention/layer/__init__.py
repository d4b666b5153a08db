"""A layer on few edges, with its linear maps, as one call each way."""
