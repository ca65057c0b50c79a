"""All that is there for TPUs, and for nothing else."""
