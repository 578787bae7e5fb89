"""Other programs that decode the same weights, an entry of the catalogue for each of their methods."""
