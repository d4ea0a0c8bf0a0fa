"""Pure cost functions: FLOP, bytes, kernels, collectives, memory."""
