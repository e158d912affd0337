"""The paper's figures: vectors by t-SNE, and attention over patches and shots."""
