"""The one effect: moving elements between ranks, over process groups or in a simulated mesh."""
