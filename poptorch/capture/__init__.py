"""From a PyTorch function to a `Trace`: what it does, op by op, without any value having been computed."""
