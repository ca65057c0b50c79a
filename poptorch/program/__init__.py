"""From captured models to programs: the main graph around a model, its loops, and the step of the optimiser."""
