"""Training: the loop, evaluation, and the lineage of a run."""
