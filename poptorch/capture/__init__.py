"""From a PyTorch function to a `Trace`: its ops, one by one, without computing any value."""
