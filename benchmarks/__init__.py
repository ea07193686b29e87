"""Speed as ratios to a bare floor measured in the same run, so that the machine's mood cancels out."""
