"""The rounds of one text: played on the terminal as they are decoded, and in a page of HTML."""
