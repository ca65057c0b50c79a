"""Distribution of a program's values over replicas, and likely mistakes with them: `popxl.analysis.checking.check`.

One pass over the ops infers the type of each value along each axis, callees at their calls, each graph once for each
tuple of input types. The effect of an op follows from its operands, except for contractions and ops between replicas,
whose traits declare it. No values are computed: the result of an op with an unknown effect is *unknown*, and has no
findings.

Reading order: `axis_types`; `inference`, the pass. It asks `variable_types` for what variables are declared to be,
`op_effects` for what an op makes of its operands, by its sharding rule (`sharding_rules`) or the equations of its JAX
function (`propagation`), and `type_changes` for what stores and updates change; `type_findings` are contradictions that
it meets. `report` holds the results. `outliers` and `value_lints` look for mistakes in them, `reduced_values` follows
what was reduced to the variables that it changes.
"""
