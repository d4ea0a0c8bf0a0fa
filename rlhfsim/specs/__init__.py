"""What is described: hardware, models, workloads, dataflows, layouts, placements."""
