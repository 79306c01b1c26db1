"""Data: tasks and streams, where they come from, how they are split, and batches."""
