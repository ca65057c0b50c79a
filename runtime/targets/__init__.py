"""Which devices there are."""
