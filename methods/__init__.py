"""The decoding methods: the drafters that guess, contrastive decoding, and the catalogue with one entry per method."""
