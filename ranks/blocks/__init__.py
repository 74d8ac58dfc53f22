"""Model blocks: each loads what its rank owns and computes rows of the FP32 residual stream. Families wire them."""
