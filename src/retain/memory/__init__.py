"""What decides how many bytes a step needs, and what the device says about it."""
