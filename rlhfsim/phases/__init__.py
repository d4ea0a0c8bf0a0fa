"""One call of the dataflow, priced: costs put together."""
