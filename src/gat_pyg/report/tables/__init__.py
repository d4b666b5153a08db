"""Tables of lines of results: their cells, what is in them, and their formats."""
