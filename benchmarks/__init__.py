"""Speed and memory as ratios to a baseline measured in the same run, so that machines compare."""
