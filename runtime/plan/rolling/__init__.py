"""Loops of what a graph does again and again: calls, and what comes with them, that differ only in what they are given.

    forms     what has to be equal in all turns of a loop
    flat      graphs that are called once are part of those that call them
    schedule  an order of the ops in which what belongs to one turn stands together
    patterns  where such an order repeats itself
    turns     what a turn takes and makes: the same each time, of the turn before, or its own
    loops     the loops of a graph
    rolling   those of a program; and which of its variables lie in one array

How a loop runs is in `runtime.lowering.rerolled_loops`.
"""
