"""Plans as configurations of other frameworks."""
