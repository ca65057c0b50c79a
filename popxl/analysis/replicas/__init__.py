"""Data-flow analysis of the distribution of values over replicas, for `popxl.analysis.checking.check`.

One forward pass over the ops infers a replication type for each value along each axis: which values are equal on all
replicas, shards, terms of a sum, or unrelated. Callees are analysed at their calls, each graph once for each tuple of
input types. The transfer function of an op is the join of its operands; contractions and ops between replicas declare
theirs by traits. No values are computed: the result of an op with an unknown effect is *unknown*, and has no findings.

Reading order: `axis_types`, the lattice; `inference`, the pass. Initial types are in `variable_types`; transfer
functions in `op_effects`, by the sharding rule of an op (`sharding_rules`) or the equations of its JAX function
(`propagation`); those of stores, exchanges and in-place updates in `type_changes`. `type_findings` are contradictions
during the pass, and `report` holds its results. `outliers` compares updates with each other, `value_lints` checks
seeds, batches and shards, and `reduced_values` tracks reduced values to the variables that they update.
"""
