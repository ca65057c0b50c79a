"""All that is there for GPUs, and for nothing else."""
