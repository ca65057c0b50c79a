"""Plans of memory within a budget: needs of graphs, an integer program over their activations, compiled trials."""
