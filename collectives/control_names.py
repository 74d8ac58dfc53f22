"""Names of the sums that are wrong on purpose (controls.py), without torch: settings and receipts speak of them too."""

NO_CONTROL = "none"

PICK_ORDER, RANK_CHAIN, BFLOAT16_PARTIALS = "pick-order", "rank-chain", "bfloat16-partials"
DROPPED_ROW, DOUBLED_ROW, FLIPPED_BIT = "dropped-row", "doubled-row", "flipped-bit"
CONTROLS = (PICK_ORDER, RANK_CHAIN, BFLOAT16_PARTIALS, DROPPED_ROW, DOUBLED_ROW, FLIPPED_BIT)

PARTIAL_SUMS = (RANK_CHAIN, BFLOAT16_PARTIALS)
"""Those that make sense for the leaves of attention too: they have ranks, but no picks."""

OTHER_ORDERS = (PICK_ORDER, *PARTIAL_SUMS)
"""Those that add in an order of their own, for which the rows of all slots must travel."""

SPOILED_ROWS = (DROPPED_ROW, DOUBLED_ROW)
"""Those that spoil what an exchange has gathered: they are as many as there are exchanges."""

FLIPPED_SUM = 2
"""The sum of a run, counted from 1, in which FLIPPED_BIT flips: the second layer with experts, where there are two."""
