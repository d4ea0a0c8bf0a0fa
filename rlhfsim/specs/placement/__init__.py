"""Which call runs where: resource pools, layouts, training backends."""
