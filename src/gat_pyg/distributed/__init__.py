"""Several processes: ranks that notice a dead one, one graph divided among them."""
