"""Contains code that several methods use. The layers and the methods import it; it imports neither,
but only the contract (methods/base) and the pools."""
