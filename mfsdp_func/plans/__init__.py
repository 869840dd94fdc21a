"""Plans: what moves between ranks. Integers only."""
