"""What compiled programs cost and need: read off what XLA gives of them."""
