"""The modules of `popdist` that need torch: `popdist.horovod` and `popdist.poptorch`."""
