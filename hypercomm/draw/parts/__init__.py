"""What pictures are made of: cells and the frames around them, groups and how far they reach."""
