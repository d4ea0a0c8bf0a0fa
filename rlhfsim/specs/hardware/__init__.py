"""What a GPU, a node and a cluster can do, and the profiles it is read from."""
