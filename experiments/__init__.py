"""What is measured, and how: flags, speed, sweeps, perplexity, diversity, and the record and repetition of a run."""
