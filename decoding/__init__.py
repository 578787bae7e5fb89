"""What a round of speculative decoding is made of: the rows of a batch and their history, the rules for how many tokens
to guess and which guesses to accept, and the steps of a model. Nothing here knows a model class: interfaces.py says
what a model must offer."""
