"""The MIV-head, to be read with the paper: recipe, blocks, pooling, cap, logits, head, training."""
