"""The parts of a round of speculative decoding: a model and its steps, the rows of a batch and their history, drafters,
draft-length rules, and verification rules."""
