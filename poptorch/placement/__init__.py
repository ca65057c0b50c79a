"""Where ops are placed: blocks, strategies, and what is around an op while a model is captured."""
