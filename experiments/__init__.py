"""What is measured: the flags and settings of a run, speed, sweeps over gamma, perplexity, diversity, a run repeated, and
the machine it ran on."""
