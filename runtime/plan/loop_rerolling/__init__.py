"""Loop rerolling: repeated ops of a graph, mostly calls, become iterations of one loop.

    op_signatures     properties of ops that must be equal in all iterations
    inlining          graphs with one call site, as parts of their callers
    clustering        an order of ops with the ops of each iteration together
    patterns          repeated sequences in such an order
    match_iterations  inputs and outputs of an iteration: invariant, carried, or its own
    loops             loops of a graph
    rerolling         loops of a program, and variables to pack into one array

`runtime.lowering.rerolled_loops` lowers these loops.
"""
