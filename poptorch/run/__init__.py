"""What runs: wrapped models, what goes into them and comes out of them, their weights, their files."""
