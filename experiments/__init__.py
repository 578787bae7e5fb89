"""What is measured and how: the flags and settings of a run, speed, sweeps over gamma, perplexity, diversity, the
repetition of a run, and the machine it ran on."""
