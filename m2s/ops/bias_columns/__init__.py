"""The bias as more columns of a product: rows with them put beside, and a gradient without them."""
