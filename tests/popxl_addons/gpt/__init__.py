"""A small GPT, the ways to train it, and the same in PyTorch. Reading order: `model`, `variants`, `parallel`."""
