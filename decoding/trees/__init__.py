"""Trees of guesses: their shapes, the guesses drawn for them, and the rules that verify them."""
