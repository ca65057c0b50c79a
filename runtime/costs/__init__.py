"""What compiled programs cost: read off the text that XLA gives of them."""
