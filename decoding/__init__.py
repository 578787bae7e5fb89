"""What a round of speculative decoding is made of: a model and its steps, the rows of a batch and their history, what
guesses, how many tokens to guess, and which guesses to accept."""
