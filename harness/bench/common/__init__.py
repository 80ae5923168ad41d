"""Parts that the benchmarks share: options, random inputs, clocks and output."""
