"""The modules of `popdist` that need torch: `popdist.poptorch`."""
