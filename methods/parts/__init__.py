"""Holds code that several methods use. The layers and the methods import it; it imports neither, and stands on the
contract (methods/base) and the pools."""
