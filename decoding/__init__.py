"""The parts of a round: a model and its steps, rows of a batch, drafters, draft-length rules, verification rules."""
