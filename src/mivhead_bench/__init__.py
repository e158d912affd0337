"""The laboratory: benchmark, rivals, data sets and the paper's figures. It builds on mivhead."""
