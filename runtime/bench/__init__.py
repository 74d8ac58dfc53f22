"""What `leafsum bench` measures: a suite a file, and what they share."""
