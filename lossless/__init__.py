"""The test of losslessness: statistical evidence from drawn texts, and samplers with a planted mistake."""
