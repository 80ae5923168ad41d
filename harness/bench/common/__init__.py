"""What the benchmarks share: arguments, inputs, clocks and output."""
