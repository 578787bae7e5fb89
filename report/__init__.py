"""What is shown: the results files, tables, figures, the verdict of a proof, and the rounds of one text."""
