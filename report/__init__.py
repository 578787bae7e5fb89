"""What is shown: the results files, tables, figures, the verdict of a proof, and one text played back."""
