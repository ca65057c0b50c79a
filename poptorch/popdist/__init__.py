"""Modules of `popdist` that require torch: `popdist.horovod` and `popdist.poptorch`."""
