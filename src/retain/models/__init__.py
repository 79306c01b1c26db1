"""From a spec to a module: bodies, and the heads on top of them."""
