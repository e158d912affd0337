"""The MIV-head, readable beside the paper."""
