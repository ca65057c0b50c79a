"""Analyses of finished graphs, each independent of the others but where said.

Sizes and work: `memory`, `flops`, `communication`, `transfers`; `estimate`, of an IPU, from the first two; `overview`,
a picture of the first and the third. Mistakes: `ambiguity`; `lints`, from the `dataflow`, the `placement` and the types
of `replicas` along the axes of the `mesh`; `checking`, all that is found in programs with replicas. Others: `edits`,
changes since a session was made; `dot`, files for Graphviz.
"""
