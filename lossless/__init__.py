"""The test of losslessness: statistical evidence from drawn texts, samplers with a planted mistake, and the run that
tests both."""
