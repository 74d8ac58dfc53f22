"""The numeric contract (docs/numerics.md) written out in numpy and plain loops.

No code is shared with the product. Slow is fine here: what counts is that each line can be held against the page.
"""
