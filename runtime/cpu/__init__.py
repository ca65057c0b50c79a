"""All that is there for CPUs, and for nothing else."""
