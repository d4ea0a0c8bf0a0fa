"""What one RLHF step must compute: algorithm, batch, lengths, the dataflow of its calls."""
