"""A small language model that trains on real text through the public API of pallas_loss."""
