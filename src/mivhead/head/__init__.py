"""The MIV-head, to be read along with the paper: recipe, blocks, pooling, cap, logits, head, training."""
