"""What is shown of a run: results.jsonl and results.txt, tables, figures, and the verdict on losslessness."""
